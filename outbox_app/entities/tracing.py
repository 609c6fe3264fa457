"""A span of OpenTelemetry for each batch of commands, with links to its callers' spans.

A batch belongs to many traces, so its span is the root of one of its own. What a command publishes
and stages stays in its caller's trace. The span is made when the answers are with their callers: an
error or a slow exporter costs none its answer. Where no caller's trace is sampled there is none;
without a provider this costs a look-up a batch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from ..process.tracing import api_with_provider
from ..text import get_logger
from .request import Call

logger = get_logger("outbox_app.entities")

#: Links of one span, as many as the SDK keeps.
MAX_LINKS = 128


def trace_batch(entity: Any, calls: Sequence[Call], began: int) -> None:
    """Make the span of a batch that began at a time (in nanoseconds) and has just been answered."""
    ended = time.time_ns()
    try:
        if not (trace := api_with_provider()):
            return
        from opentelemetry.context import Context

        spans = [call.caller.context.copy().run(trace.get_current_span) for call in calls]
        callers = [span.get_span_context() for span in spans]
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
