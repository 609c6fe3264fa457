"""The module of shadow mode is found by the doors of its app, whatever Django has readied."""

from __future__ import annotations

import pytest
from django.core.exceptions import ImproperlyConfigured

from outbox_app.jobs.staging import calls
from outbox_app.shadow import producer


def test_it_is_there_with_its_app_only(monkeypatch: pytest.MonkeyPatch) -> None:
    assert calls.shadow_mode() is producer
    others = tuple(doors for doors in calls.all_doors() if doors.name != "shadow")
    monkeypatch.setattr(calls, "all_doors", lambda: others)
    with pytest.raises(ImproperlyConfigured, match=r'Add "outbox_app\.shadow" to'):
        calls.shadow_mode()
