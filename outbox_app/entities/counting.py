"""Counts the commands that this process answers, by minute: how many, and how fast.

Counting costs a batch no statement: a batch reads the database's clock anyway, which gives the
minute. Commands in a caller's transaction are counted when it commits. The counters are written
after the callers have their answers, but for those of a batch one of whose callbacks executes a
command. Nothing here raises, except a task's time limit.

A batch belongs to many traces, so its OpenTelemetry span is the root of a trace of its own, with
links to its callers' sampled spans. If there are none, it has no span.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from ..database.transactions import after_commit, is_in_test
from ..process import counters
from ..process.tracing import MAX_LINKS, api_with_provider
from ..text import get_logger
from . import series as names
from .batch import Batch
from .request import Call

logger = get_logger("outbox_app.entities")

#: How many codes of rejections a process tells apart in a minute; the others are "other".
CODES, OTHER = 20, "other"


def count(batch: Batch | None, *, conflicts: int, seconds: float | None = None) -> None:
    """Count a batch's conflicts and, if it was committed, its commands and its ``seconds``."""
    if batch is None or not hasattr(batch, "now"):
        return  # the last attempt has not read the database's clock
    with counters.counting(batch.now, using=batch.using) as minute:
        minute.add(names.CONFLICTS, conflicts)
        if seconds is not None and batch.steps:
            minute.observe(names.COMMIT_TIME, seconds)
            _figures(batch)(minute)


def count_after_commit(batch: Batch) -> None:
    # A test's own transaction never commits; captureOnCommitCallbacks would list the callback.
    if not batch.steps or is_in_test(batch.using):
        return
    using, now, add = batch.using, batch.now, _figures(batch)

    def committed() -> None:
        with counters.counting(now, using=using) as minute:
            add(minute)
        write_if_due(using)

    after_commit(committed, using=using)


def write_if_due(using: str) -> None:
    """Write the counters, unless they were written lately or a transaction is open."""
    from .queue import queues  # queue imports this module

    counters.write_shared(using, lambda: {names.WAITING: queues.waiting_on(using)})


def _figures(batch: Batch) -> Callable[[counters.Minute], None]:
    """Return a function that counts a batch. It keeps only figures: there may be many batches."""
    answers: list[Any] = [step.answer for step in batch.steps if step.rejected]
    codes = Counter(each.rejected.code for each in answers)
    routes = Counter(step.route for step in batch.steps if step.route)
    size = len(batch.steps)

    def add(minute: counters.Minute) -> None:
        minute.add(names.COMMANDS, size)
        minute.observe(names.BATCH_SIZE, size, names.SIZES)
        for route, count in routes.items():
            minute.add(names.ROUTED, count, dimension=names.ROUTE, label=route)
        for code, count in codes.items():
            known = [label for name, _, label in minute.values if name == names.REJECTED]
            label = code if code in known or len(known) < CODES else OTHER
            minute.add(names.REJECTED, count, dimension=names.CODE, label=label)

    return add


def trace_batch(entity: Any, calls: Sequence[Call], began: int) -> None:
    """Make the span of a batch that has just been answered; ``began`` is in nanoseconds."""
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
        logger.warning("Tracing a batch failed error=%s", error)
