"""Traces of OpenTelemetry, which need not be installed, carried as W3C headers.

The trace of a request is carried as two strings, ``traceparent`` and ``tracestate``: in the headers
of a job, or in the metadata of a prepared event. The code that handles these later starts a span in
that trace, or, for jobs or events of several traces, a span with links to them. Without a tracer
provider this costs a look-up. Errors of samplers, processors and exporters are only logged.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

from ..text import get_logger

logger = get_logger("outbox_app.tracing")

TRACE = ("traceparent", "tracestate")
#: The longest header, in characters; the most links of a span, as many as the SDK keeps.
LONGEST, MAX_LINKS = 512, 128


def api_with_provider() -> Any:
    """Return the module ``opentelemetry.trace``; None without a tracer provider."""
    # A module that is not imported, or is just being imported by another thread, has no provider.
    trace: Any = sys.modules.get("opentelemetry.trace")
    provider = getattr(trace, "get_tracer_provider", None)
    # The first call may create a provider, if environment variables ask for one.
    if provider is None or isinstance(provider(), trace.ProxyTracerProvider):
        return None
    return trace


def trace_in(carrier: Any) -> dict[str, str]:
    """Return the headers of the trace in a mapping of headers or metadata; empty without one."""
    headers = {name: carrier.get(name) for name in TRACE} if isinstance(carrier, Mapping) else {}
    return {name: v for name, v in headers.items() if isinstance(v, str) and len(v) <= LONGEST}


def current_trace() -> dict[str, str]:
    """Return the headers of the caller's trace; empty without one."""
    carrier: dict[str, str] = {}
    try:
        if api_with_provider():
            _propagator().inject(carrier)
    except Exception as error:
        logger.warning("Trace context not injected error=%s", error)
    return carrier


def span_of(carrier: Any) -> Any:
    """Return the carried span, to be used as a parent; None unless its trace is sampled."""
    try:
        if (headers := trace_in(carrier)) and (trace := api_with_provider()):
            from opentelemetry.context import Context

            span = trace.get_current_span(_propagator().extract(headers, context=Context()))
            context = span.get_span_context()
            return span if context.is_valid and context.trace_flags.sampled else None
    except Exception as error:
        logger.warning("Trace context not extracted error=%s", error)
    return None


def start_span(name: str, carriers: Iterable[Any], *, kind: str, **options: Any) -> Any:
    """Start a span as ``new_span`` does, but log errors of samplers and processors."""
    try:
        return new_span(name, carriers, kind=kind, **options)
    except Exception as error:
        logger.warning("Span not started error=%s", error)
        return None


def new_span(name: str, carriers: Iterable[Any], *, kind: str, **options: Any) -> Any:
    """Start a span in the carried trace, or with links to several traces; None if there is none."""
    if not (trace := api_with_provider()):
        return None
    spans = islice(filter(None, map(span_of, carriers)), MAX_LINKS)
    parents = {(c := span.get_span_context()).span_id: c for span in spans}
    traces = {each.trace_id for each in parents.values()}
    if not traces:
        return None
    first, *others = parents.values()
    within = first if len(traces) == 1 else trace.INVALID_SPAN_CONTEXT
    return trace.get_tracer("outbox_app").start_span(
        name,
        context=trace.set_span_in_context(trace.NonRecordingSpan(within)),
        kind=trace.SpanKind[kind],
        links=[trace.Link(each) for each in (others if len(traces) == 1 else parents.values())],
        **options,
    )


@contextmanager
def inside(span: Any) -> Iterator[None]:
    """Run a block inside a span, and end the span; without a span just run the block."""
    if span is None:
        yield
        return
    trace = api_with_provider()
    with trace.use_span(span, record_exception=False, set_status_on_exception=False):
        try:
            yield
        except BaseException as error:
            # Not the message of the error, which may contain anything.
            span.set_status(trace.StatusCode.ERROR, type(error).__name__)
            raise
        finally:
            try:
                span.end()
            except Exception as error:
                logger.warning("Span not exported error=%s", error)


def _propagator() -> Any:
    from opentelemetry.trace.propagation import tracecontext

    return tracecontext.TraceContextTextMapPropagator()
