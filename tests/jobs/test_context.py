"""A context variable that is set for a block does not stay set, even if a signal raises."""

from __future__ import annotations

import dis
import sys
from contextlib import suppress
from contextvars import ContextVar
from itertools import pairwise
from typing import Any

from outbox_app.jobs.context import let

variable: ContextVar[str] = ContextVar("variable", default="before")
CODE = let.__wrapped__.__code__  # type: ignore[attr-defined]


class SoftLimit(Exception):
    """As Celery's, which the handler of a signal raises."""


def raising_at(place: int, raised: list[int]) -> Any:
    def trace(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code is not CODE:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti == place:
            raised.append(place)
            raise SoftLimit
        return trace

    return trace


def test_a_signal_that_raises_while_it_is_set() -> None:
    """Handlers run after a call. A batch of jobs that stayed would take all later ones."""
    steps = pairwise(dis.get_instructions(CODE))
    places = [step.offset for before, step in steps if before.opname.startswith("CALL")]
    tracer, raised = sys.gettrace(), list[int]()
    for place in places:
        sys.settrace(raising_at(place, raised))
        try:
            with suppress(SoftLimit), let(variable, "inside"):
                pass
        finally:
            sys.settrace(tracer)
        assert variable.get() == "before", place
    assert raised
