"""Subscriptions of a test, as in tests/subscriptions/control."""

from __future__ import annotations

from tests.subscriptions.control.conftest import published, run, running, seen_by

__all__ = ["published", "run", "running", "seen_by"]
