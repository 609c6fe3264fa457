"""Fixtures of the intake's tests: a shadow compares with what they send."""

from __future__ import annotations

from tests.jobs.staging.conftest import add, app, broker_url, inbox, sent, sent_by, staged

__all__ = ["add", "app", "broker_url", "inbox", "sent", "sent_by", "staged"]
