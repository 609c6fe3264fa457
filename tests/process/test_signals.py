"""SIGTERM and SIGINT end what runs in the foreground, whatever it does at that moment."""

from __future__ import annotations

import signal
import sys
from typing import Any

import pytest

from outbox_app.management.commands.outbox_pipeline import _stopped_by_signals


@pytest.mark.timeout(20)
def test_a_signal_at_any_moment_of_a_wait() -> None:
    """The handler must not need a lock that the wait may hold: nothing would end that."""

    def trace(frame: Any, event: str, argument: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return trace

    before = sys.gettrace()
    with _stopped_by_signals() as stopped:
        sys.settrace(trace)
        try:
            stopped.wait(0.01)
        finally:
            sys.settrace(before)
        assert stopped.is_set()
