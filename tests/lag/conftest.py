"""Subscriptions of a test, as in tests/positions."""

from __future__ import annotations

from tests.positions.conftest import published, run, running, seen_by

__all__ = ["published", "run", "running", "seen_by"]
