"""A whole project under OpenTelemetry, in a process of its own: what it instruments stays so.

``python -m tests.monitoring.traced SCENARIO`` prints the spans that were made, and what was logged,
as JSON. Its environment is that of the fixture ``environment``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import threading
import uuid
from collections.abc import Iterator
from typing import Any

import django
from opentelemetry import trace
from opentelemetry.instrumentation.celery import CeleryInstrumentor
from opentelemetry.instrumentation.django import DjangoInstrumentor
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from tests.patience import patience

ALIAS = os.environ["OUTBOX_ALIAS"]
exporter = InMemorySpanExporter()
logged: list[str] = []
urlpatterns: list[Any] = []


class Logged(logging.Handler):
    """Keeps warnings, and errors."""

    def emit(self, record: logging.LogRecord) -> None:
        logged.append(f"{record.name}: {record.getMessage()}")


def start() -> None:
    """Instrument the process, as a project does at its start."""
    logging.getLogger().addHandler(Logged(logging.WARNING))
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    django.setup()
    DjangoInstrumentor().instrument()
    CeleryInstrumentor().instrument()


def make_app(broker: str) -> Any:
    from outbox_app.celery import OutboxCelery

    name = f"traced-{uuid.uuid4().hex[:12]}"
    app = OutboxCelery(name, broker=broker)
    app.conf.update(task_default_queue=name, worker_hijack_root_logger=False)
    return app


def request(view: Any) -> None:
    """Let a real request run the view, inside ``atomic()``."""
    from django.db import transaction
    from django.http import HttpResponse
    from django.test import Client, override_settings
    from django.urls import path

    def handle(request: Any) -> HttpResponse:
        with transaction.atomic(using=ALIAS):
            view()
        return HttpResponse("placed")

    urlpatterns[:] = [path("orders/", handle)]
    with override_settings(ROOT_URLCONF=__name__, ALLOWED_HOSTS=["*"]):
        assert Client().get("/orders/").content == b"placed"


def drained() -> dict[str, int]:
    from outbox_app.jobs.drain.drain import Drain

    tally = Drain(using=ALIAS).run(once=True)
    return {"published": tally.published, "dead": tally.dead}


def whole_way() -> dict[str, Any]:
    """From the request through the drain to the worker, and what the request left behind."""
    from celery.contrib.testing.worker import start_worker

    app = make_app(os.environ["BROKER_URL"])
    executed: set[int] = set()
    done = threading.Event()

    @app.task(name="shop.receipt")
    def receipt(number: int) -> None:
        with trace.get_tracer("shop").start_as_current_span("send the mail"):
            executed.add(number)
            if executed == {1, 2}:
                done.set()

    @app.task(name="shop.refused")
    def refused(number: int) -> None: ...

    def view() -> None:
        receipt.delay(1)
        try:
            receipt.apply_async((1,), countdown=1e9)  # further away than is allowed
        except Exception as error:
            logged.append(f"refused: {type(error).__name__}")
        receipt.delay(2)
        refused.apply_async((3,), exchange="nowhere", routing_key="nobody")

    request(view)
    staged = spans()
    kept = [len(getattr(task, "__otel_task_span", {})) for task in (receipt, refused)]
    tally = drained()
    with start_worker(app, pool="solo", perform_ping_check=False, shutdown_timeout=patience(60)):
        assert done.wait(patience(60)), "the worker did not execute the task"
    return {"staged": staged, "kept": kept, "tally": tally}


def bounds() -> dict[str, Any]:
    """What gets no span: beyond the bound, not sampled, without a context, with a damaged one."""
    from opentelemetry.sdk.trace.sampling import ALWAYS_OFF

    from outbox_app import stage
    from outbox_app.jobs.drain import tracing

    CeleryInstrumentor().uninstrument()
    app = make_app("memory://")

    @app.task(name="shop.note")
    def task(number: int) -> None: ...

    tracing.MAX_SPANS = 3
    off = TracerProvider(sampler=ALWAYS_OFF).get_tracer("off")
    on = trace.get_tracer("on")

    def traced(tracer: Any) -> dict[str, str]:
        headers: dict[str, str] = {}
        with tracer.start_as_current_span("caller"):
            from opentelemetry.propagate import inject

            inject(headers)
        return headers

    def view() -> None:
        for headers in [{}, {"traceparent": 7}, {"traceparent": "00-x"}, traced(off)]:
            stage(task, (0,), headers=headers)
        for number in range(5):
            stage(task, (number,), headers=traced(on))

    request(view)
    return {"tally": drained()}


def blocked() -> dict[str, Any]:
    """A job that is not sent, because an earlier one of its key was refused, amid others."""
    from django.conf import settings
    from django.test import override_settings

    app = make_app("memory://")

    @app.task(name="shop.note")
    def task(number: int) -> None: ...

    def view() -> None:
        task.apply_async((1,), exchange="nowhere", routing_key="nobody", ordering_key="k")
        task.apply_async((2,), ordering_key="k")
        task.apply_async((3,))

    request(view)
    with override_settings(OUTBOX={**settings.OUTBOX, "DEAD_KEY": "block"}):
        return {"tally": drained()}


def broken() -> dict[str, Any]:
    """A processor of the project that raises."""

    class Broken(SpanProcessor):
        def on_start(self, span: Any, parent_context: Any = None) -> None:
            raise RuntimeError("broken")

    app = make_app("memory://")

    @app.task(name="shop.note")
    def task(number: int) -> None: ...

    request(lambda: task.delay(1))
    trace.get_tracer_provider().add_span_processor(Broken())
    return {"tally": drained()}


def slow() -> dict[str, Any]:
    """A processor that takes a whole batch's time over one span, and looks at the rows."""
    from outbox_app.jobs.drain import tracing
    from outbox_app.models import StagedJob

    left: list[int] = []

    class Slow(SpanProcessor):
        def on_end(self, span: Any) -> None:
            left.append(StagedJob.objects.using(ALIAS).count())

    app = make_app("memory://")

    @app.task(name="shop.note")
    def task(number: int) -> None: ...

    request(lambda: [task.delay(number) for number in range(3)])
    tracing.MAX_SECONDS = 0
    trace.get_tracer_provider().add_span_processor(Slow())
    return {"tally": drained(), "left": left}


def unprovided() -> dict[str, Any]:
    """The environment names a provider that is not installed: asking for it raises."""
    from outbox_app import stage

    app = make_app("memory://")

    @app.task(name="shop.note")
    def task(number: int) -> None: ...

    request(lambda: stage(task, (1,)))
    trace._TRACER_PROVIDER = None
    os.environ["OTEL_PYTHON_TRACER_PROVIDER"] = "nowhere"
    return {"tally": drained()}


def spans() -> list[dict[str, Any]]:
    return list(map(shown, exporter.get_finished_spans()))


def shown(span: Any) -> dict[str, Any]:
    return {
        "name": span.name,
        "kind": span.kind.name,
        "trace": f"{span.context.trace_id:032x}",
        "id": f"{span.context.span_id:016x}",
        "parent": f"{span.parent.span_id:016x}" if span.parent else None,
        "status": span.status.status_code.name,
        "description": span.status.description,
        "attributes": dict(span.attributes),
        "seconds": (span.end_time - span.start_time) / 1e9,
    }


SCENARIOS = {each.__name__: each for each in (whole_way, bounds, blocked, broken, slow, unprovided)}


def main() -> Iterator[str]:
    start()
    told = SCENARIOS[sys.argv[1]]()
    yield json.dumps({**told, "spans": spans(), "logged": logged}, default=str)


if __name__ == "__main__":
    sys.modules["tests.monitoring.traced"] = sys.modules["__main__"]
    sys.stdout.writelines(main())
