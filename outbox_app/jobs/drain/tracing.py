"""OpenTelemetry spans for published jobs, each in the trace in which its job was staged.

A job's headers carry the context of the request that staged it. If this process has a tracer
provider and that trace is sampled, the publish becomes a span of it, a child of the span that
staged the job. The message is not changed, so the worker's span has the same parent. The drain
makes the spans after it has deleted the rows, for a limited number of jobs and for a second at
most: an error or a slow exporter stops nothing, and causes no second send.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

from ...process.tracing import api_with_provider
from ...text import get_logger
from .outcome import PreparedMessage, PublishResult

logger = get_logger("outbox_app.drain")

#: The most spans of one batch: they go to the first jobs whose traces are sampled.
MAX_SPANS = 100
#: The most jobs of one batch whose context is read.
MAX_LOOKS = 1000
#: Seconds after which a batch gets no more spans, as an exporter may be slow with each.
MAX_SECONDS = 1.0


def trace_batch(outcome: PublishResult) -> None:
    """Make the spans of a batch, once its rows are settled."""
    try:
        if trace := api_with_provider():
            _make_spans(trace, outcome)
    except Exception as error:  # samplers, processors and exporters may raise anything
        logger.warning("Tracing a batch failed error=%r", error)


def _make_spans(trace: Any, outcome: PublishResult) -> None:
    tracer, until = trace.get_tracer("outbox_app"), time.monotonic() + MAX_SECONDS
    # The error of each row that was sent, or None if it was accepted.
    errors: dict[int, Exception | None] = {row.id: outcome.error for row in outcome.unknown}
    errors |= {row.id: error for row, error in outcome.refused}
    errors |= {row.id: None for row in outcome.accepted}
    sent = [item for item in outcome.prepared[:MAX_LOOKS] if item.row.id in errors]
    for item, context in islice(_traced(trace, sent), MAX_SPANS):
        row, error = item.row, errors[item.row.id]
        span = tracer.start_span(
            "outbox publish",
            context=context,
            kind=trace.SpanKind.PRODUCER,
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
        if error is not None:
            # Not the text of the error: it may hold an address or a part of the message.
            span.set_status(trace.StatusCode.ERROR, type(error).__name__)
        span.end(outcome.began + int(outcome.seconds * 1e9))
        if time.monotonic() >= until:
            return


def _traced(trace: Any, sent: list[PreparedMessage]) -> Iterator[tuple[PreparedMessage, Any]]:
    """Yield the jobs that were staged in a sampled trace, with its context."""
    from opentelemetry.context import Context
    from opentelemetry.propagate import extract, get_global_textmap

    fields = get_global_textmap().fields
    for item in sent:
        given = {name: item.message.headers.get(name) for name in fields}
        headers = {name: value for name, value in given.items() if isinstance(value, str)}
        if not headers:
            continue
        context = extract(headers, context=Context())
        parent = trace.get_current_span(context).get_span_context()
        if parent.is_valid and parent.trace_flags.sampled:
            yield item, context
