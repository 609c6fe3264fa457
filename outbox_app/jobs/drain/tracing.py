"""OpenTelemetry spans for published jobs, each in the trace in which its job was staged.

A job's headers carry the context of the request that staged it. If this process has a tracer
provider and that trace is sampled, the publish becomes a span of it, a child of the span that
staged the job. The message is not changed, so the worker's span has the same parent. The drain
makes the spans after it has deleted the rows, for a limited number of jobs and for a second at
most: an error or a slow exporter stops nothing, and causes no second send.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from ...process.tracing import api_with_provider, new_span
from ...text import get_logger

if TYPE_CHECKING:
    from .outcome import PublishResult

logger = get_logger("outbox_app.drain")

#: The most spans of one batch: they go to the first jobs whose traces are sampled.
MAX_SPANS = 100
#: Seconds after which a batch gets no more spans, as an exporter may be slow with each.
MAX_SECONDS = 1.0


def trace_batch(outcome: PublishResult) -> None:
    """Make the spans of a batch, once its rows are settled."""
    try:
        if trace := api_with_provider():
            _make_spans(trace, outcome)
    except Exception as error:  # samplers, processors and exporters may raise anything
        logger.warning("Tracing a batch failed error=%s", error)


def _make_spans(trace: Any, outcome: PublishResult) -> None:
    made, until = 0, time.monotonic() + MAX_SECONDS
    # The error of each row that was sent, or None if it was accepted.
    errors: dict[int, Exception | None] = {row.id: outcome.error for row in outcome.unknown}
    errors |= {row.id: error for row, error in outcome.refused}
    errors |= {row.id: None for row in outcome.accepted}
    for item in outcome.prepared:
        row = item.row
        span = row.id in errors and new_span(
            "outbox publish",
            [item.message.headers],
            kind="PRODUCER",
            attributes={
                "messaging.operation.name": "publish",
                "messaging.operation.type": "send",
                "messaging.destination.name": row.queue,
                "messaging.message.id": row.task_id,
                "messaging.batch.message_count": len(outcome.prepared),
                "celery.task_name": row.task,
                "outbox.waited_seconds": round(row.waited, 6),
            },
            start_time=outcome.began,
        )
        if span:
            if (error := errors[row.id]) is not None:
                # Not the text of the error: it may hold an address or a part of the message.
                span.set_status(trace.StatusCode.ERROR, type(error).__name__)
            span.end(outcome.began + int(outcome.seconds * 1e9))
            made += 1
        if made == MAX_SPANS or time.monotonic() >= until:
            return
