"""Counts what this process has answered, by the minute: how many, how fast, on which entities.

Counting costs a batch some memory and no statement: the minute is that of its own reading of the
database's clock. What runs in the caller's transaction is counted when that commits. The counters
are written after the answers are with their callers. Nothing here raises but a task's time limit.

Each batch has a span of OpenTelemetry, made when it is answered, with links to its callers' spans.
It belongs to many traces, so it is the root of one of its own; where no caller's trace is sampled
there is none.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from ..process import counters
from ..process.tracing import MAX_LINKS, api_with_provider
from ..text import get_logger
from ..transactions import after_commit, is_in_test
from .attempt import Attempt
from .request import Call

logger = get_logger("outbox_app.entities")

#: Upper bounds of the buckets of batches by size; one more has the larger ones.
SIZES = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
SIZE_LABELS = (*map(str, SIZES), "+Inf")
#: Codes of rejections that a process tells apart in a minute; the others are "other".
CODES, OTHER = 20, "other"
#: Entities that a process knows of at most, each minute.
KNOWN = 1000


def count(attempt: Attempt | None, *, conflicts: int, seconds: float | None = None) -> None:
    """Count the attempts of a batch; and what the last one has committed, which took so long."""
    if attempt is None or not hasattr(attempt, "now"):
        return  # it has not read the database's clock
    with counters.counting(attempt.now, using=attempt.using) as minute:
        minute.add(counters.CONFLICTS, conflicts)
        if seconds is not None and attempt.steps:
            minute.observe(counters.COMMIT_TIME, seconds)
            _figures(attempt)(minute)


def count_after_commit(attempt: Attempt) -> None:
    # A test's own transaction never commits; captureOnCommitCallbacks would list the callback.
    if not attempt.steps or is_in_test(attempt.using):
        return
    using, now, add = attempt.using, attempt.now, _figures(attempt)

    def committed() -> None:
        with counters.counting(now, using=using) as minute:
            add(minute)
        write_if_due(using)

    after_commit(committed, using=using, robust=True)


def write_if_due(using: str) -> None:
    """Write the counters, unless that was done lately or a transaction is open."""
    counters.write_shared(using, partial(_samples, using))


def _samples(using: str) -> dict[str, float] | None:
    from .queue import queues  # which imports this

    if queues.leads_here():
        return None  # a callback of a batch whose callers wait for their answers
    return {counters.WAITING: queues.waiting_on(using)}


def _figures(attempt: Attempt) -> Callable[[counters.Minute], None]:
    """Return what counts a batch. It holds figures only: a transaction may have very many."""
    answers: list[Any] = [step.answer for step in attempt.steps if step.rejected]
    codes = Counter(each.rejected.code for each in answers)
    routes = Counter(step.route for step in attempt.steps if step.route)
    entity, size = f"{attempt.entity._meta.label}:{attempt.id}", len(attempt.steps)

    def add(minute: counters.Minute) -> None:
        minute.add(counters.COMMANDS, size)
        minute.observe(counters.BATCH_SIZE, size, SIZES)
        for route, count in routes.items():
            minute.add(counters.ROUTED, count, dimension=counters.ROUTE, label=route)
        for code, count in codes.items():
            known = [label for name, _, label in minute.values if name == counters.REJECTED]
            label = code if code in known or len(known) < CODES else OTHER
            minute.add(counters.REJECTED, count, dimension=counters.CODE, label=label)
        top = minute.tops[counters.HOTTEST, counters.ENTITY]
        top[entity] += size
        if len(top) > KNOWN:
            most = dict(top.most_common(KNOWN // 10))
            minute.tops[counters.HOTTEST, counters.ENTITY] = Counter(most)

    return add


def trace_batch(entity: Any, calls: Sequence[Call], began: int) -> None:
    """Make the span of a batch that began at a time (in nanoseconds) and has just been answered."""
    ended = time.time_ns()
    try:
        if not (trace := api_with_provider()):
            return
        from opentelemetry.context import Context

        callers = [c.context.copy().run(trace.get_current_span).get_span_context() for c in calls]
        linked = {c.span_id: c for c in callers if c.is_valid and c.trace_flags.sampled}
        if linked:
            label = entity._meta.label
            span = trace.get_tracer("outbox_app").start_span(
                f"entity batch {label}",
                context=Context(),
                attributes={"outbox.entity.type": label, "outbox.batch.commands": len(calls)},
                links=[trace.Link(each) for each in list(linked.values())[:MAX_LINKS]],
                start_time=began,
            )
            span.end(ended)
    except Exception as error:  # samplers, processors and exporters may raise anything
        logger.warning("Tracing a batch failed error=%r", error)
