"""One trace from the request that prepared, through the confirm, to the subscriber."""

from __future__ import annotations

from typing import Any
from uuid import uuid4

import pytest
from django.db import transaction
from opentelemetry import trace
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider, sampling
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outbox_app.door.messages import cloudevent, prepared_fields
from outbox_app.events import NewEvent, publish_many, subscriber
from outbox_app.events.models import Event
from outbox_app.events.subscriptions.runner import Runner
from outbox_app.events.subscriptions.subscriber import subscriber_named
from outbox_app.prepared import NewPrepared, prepare, prepared
from outbox_app.prepared.models import PreparedEvent
from outbox_app.prepared.request import checked
from outbox_app.process.tracing import current_trace

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"])


@pytest.fixture
def provider(monkeypatch: Any) -> TracerProvider:
    """A provider for this test alone: a process can set its provider only once."""
    made = TracerProvider()
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: made)
    return made


@pytest.fixture
def spans(provider: TracerProvider) -> Any:
    """``spans(name)``: the spans of this name that have ended."""
    exporter = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return lambda name: [each for each in exporter.get_finished_spans() if each.name == name]


def request() -> Any:
    return trace.get_tracer("shop").start_as_current_span("POST /pay/")


@pytest.fixture
def handle(alias: str) -> Any:
    """``handle()``: a subscription handles the events, in a span of the handler's own."""

    def run(fails: bool = False) -> None:
        @subscriber("mail")
        def mail(events: list[Any]) -> None:
            with trace.get_tracer("shop").start_as_current_span("send the mail"):
                if fails:
                    raise ValueError("secret")

        Runner([subscriber_named("mail")]).run(once=True)

    return run


def parent(span: Any) -> Any:
    return span.parent and (span.parent.trace_id, span.parent.span_id)


def id_of(span: Any) -> Any:
    return span.context.trace_id, span.context.span_id


def one_trace(spans: Any) -> None:
    [began], [confirmed], [handled] = map(spans, ("POST /pay/", "outbox confirm", "outbox handle"))
    [mailed] = spans("send the mail")
    assert parent(confirmed) == parent(handled) == id_of(began)
    assert parent(mailed) == id_of(handled)
    assert confirmed.start_time < confirmed.end_time <= handled.start_time
    assert dict(handled.attributes) == {
        "outbox.subscription": "mail",
        "messaging.batch.message_count": 1,
    }


def test_confirmed_by_a_call(alias: str, sender: str, spans: Any, told: Any, handle: Any) -> None:
    with request(), prepared("order-17", "order.paid", using=sender, metadata={"user": 7}):
        pass
    told()
    [event] = Event.objects.using(alias)
    assert event.metadata.keys() == {"user", "traceparent"}
    handle()
    one_trace(spans)


def test_confirmed_by_the_check_back(
    alias: str, spans: Any, make: Any, pay: Any, ask: Any, handle: Any
) -> None:
    with request():
        event = make()
    pay(event)
    ask()
    handle()
    one_trace(spans)


@pytest.mark.parametrize("alias", [pytest.param("postgres", id="postgres")], indirect=True)
def test_over_the_door(
    alias: str,
    sender: str,
    spans: Any,
    both: None,
    serve: Any,
    handle: Any,
) -> None:
    """The keeper is a process without OpenTelemetry."""
    serve("shop", alias)
    with request(), prepared("order-17", "order.paid", using=sender, to="shop", wait=True):
        pass
    handle()
    [began], [handled] = spans("POST /pay/"), spans("outbox handle")
    assert parent(handled) == id_of(began)


@pytest.mark.parametrize("new", [{"stream": "s", "type": "made"}, {"job": "shop.mail"}])
def test_what_is_sent_bears_it(spans: Any, new: dict[str, Any], monkeypatch: Any) -> None:
    """Of another service, as the extension of CloudEvents; of ours, a job's too."""
    monkeypatch.setattr("outbox_app.prepared.request._check_task", lambda *args: None)
    with request():
        given = current_trace()
        ours = cloudevent(checked(NewPrepared(**new)), source="/billing")
    theirs = {name: v for name, v in ours.items() if name not in ("metadata", *given)} | given
    for event in (ours, theirs):
        content = checked(NewPrepared(**prepared_fields(event))).content
        assert content.get("headers", content.get("metadata")) == given


def test_a_job_is_in_it(alias: str, sender: str, spans: Any, told: Any, monkeypatch: Any) -> None:
    """What instruments Celery in the keeper finds the trace that it continues."""
    staged: list[Any] = []

    def stage(name: str, *args: Any, headers: Any, **options: Any) -> None:
        staged.append((headers, current_trace()))

    monkeypatch.setattr("outbox_app.prepared.keeper.stage", stage)
    monkeypatch.setattr("outbox_app.prepared.request._check_task", lambda *args: None)
    with request(), prepared(job="shop.mail", using=sender):
        pass
    told()
    [(headers, current)] = staged
    assert headers == current
    [began] = spans("POST /pay/")
    assert f"{began.context.trace_id:032x}-{began.context.span_id:016x}" in headers["traceparent"]


def test_repeated_in_another_trace(alias: str, sender: str, spans: Any) -> None:
    """The same answer: the trace is not of the content."""
    id = uuid4()
    for _ in range(2):
        with request():
            prepare("order-17", "order.paid", using=sender, event_id=id)
    prepare("order-17", "order.paid", using=sender, event_id=id)
    [row] = PreparedEvent.objects.using(alias)
    first, _ = spans("POST /pay/")
    assert f"{first.context.trace_id:032x}" in row.content["metadata"]["traceparent"]


def publish_in(alias: str, *traces: dict[str, Any]) -> None:
    with transaction.atomic(using=alias):
        publish_many(
            [NewEvent(f"s{n}", "made", {}, given) for n, given in enumerate(traces)], using=alias
        )


def test_events_of_several_traces_are_linked(alias: str, spans: Any, handle: Any) -> None:
    carried: list[dict[str, Any]] = [{}, {"traceparent": 7}, {"traceparent": "00-x"}]
    for _ in range(2):
        with request():
            carried.append(current_trace())
    off = TracerProvider(sampler=sampling.ALWAYS_OFF).get_tracer("off")
    with off.start_as_current_span("not sampled"):
        carried.append(current_trace())
    publish_in(alias, *carried)
    handle()
    [handled] = spans("outbox handle")
    assert handled.parent is None
    linked = [(each.context.trace_id, each.context.span_id) for each in handled.links]
    assert linked == list(map(id_of, spans("POST /pay/")))
    assert [parent(each) for each in spans("send the mail")] == [id_of(handled)]


def test_a_handler_that_fails_says_so_without_its_words(
    alias: str, spans: Any, handle: Any
) -> None:
    with request():
        publish_in(alias, current_trace())
    handle(fails=True)
    handled = spans("outbox handle")[0]
    assert (handled.status.status_code.name, handled.status.description) == ("ERROR", "ValueError")
    assert handled.events == ()


def test_what_fails_while_tracing_stops_nothing(
    alias: str, sender: str, provider: Any, told: Any, states: Any, spans: Any, handle: Any
) -> None:
    class Broken(SpanProcessor):
        def on_start(self, span: Any, parent_context: Any = None) -> None:
            if span.name.startswith("outbox"):
                raise RuntimeError("start")

        def on_end(self, span: Any) -> None:
            if span.name.startswith("outbox"):
                raise RuntimeError("end")

    with request(), prepared("order-17", "order.paid", using=sender):
        pass
    provider.add_span_processor(Broken())
    told()
    assert states() == ["confirmed"]
    handle()
    assert len(spans("send the mail")) == 1


def test_without_a_provider_nothing_is_carried(
    alias: str, sender: str, told: Any, handle: Any
) -> None:
    with prepared("order-17", "order.paid", using=sender):
        pass
    told()
    assert [each.metadata for each in Event.objects.using(alias)] == [{}]
    handle()
