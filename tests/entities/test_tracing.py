"""A batch's span: one for all callers, linked to theirs; a failing exporter costs no answer."""

from __future__ import annotations

import asyncio
import sys
from types import ModuleType

import pytest
from django.db import connections
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider, sampling
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from outbox_app.entities import Command, queue
from tests.entities.models import Account
from tests.patience import eventually

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def exporter(monkeypatch):
    """Collects spans. The test has its own provider: a process can set one only once."""
    made, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(made))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    return made


def batches(exporter):
    return [span for span in exporter.get_finished_spans() if span.name.startswith("entity batch")]


def many(alias, count=7):
    commands = [Command("a", "withdraw", {"amount": 0}, command_id=f"m{n}") for n in range(count)]
    return Account.execute_many(commands, using=alias)


def test_callers_are_linked_and_each_command_is_in_one_batch(alias, account, exporter, monkeypatch):
    monkeypatch.setattr(queue, "IDLE", 0.2)
    tracer = trace.get_tracer("test")

    async def call(number):
        with tracer.start_as_current_span(f"request {number}"):
            options = {"command_id": f"t{number}", "using": alias, "timeout": 60}
            await Account.aexecute("a", "withdraw", {"amount": 0}, **options)

    async def call_all():
        await asyncio.gather(*(call(number) for number in range(20)))

    asyncio.run(call_all())
    connections.close_all()
    # A span is made when the answers are with their callers.
    eventually(lambda: sum(len(span.links) for span in batches(exporter)) == 20)
    eventually(lambda: not queue.queues.threads)  # they have connections
    spans = {span.context.span_id: span for span in exporter.get_finished_spans()}
    found = batches(exporter)
    linked = [link.context.span_id for span in found for link in span.links]
    assert sorted(spans[each].name for each in linked) == sorted(f"request {n}" for n in range(20))
    assert sum(span.attributes["outbox.batch.commands"] for span in found) == 20
    assert len(found) < 20
    for span in found:
        assert span.name == "entity batch entities.Account"
        assert span.parent is None
        for link in span.links:
            assert spans[link.context.span_id].start_time <= span.end_time
            assert span.start_time <= span.end_time


def test_a_caller_of_many_is_linked_once(alias, account, exporter):
    with trace.get_tracer("test").start_as_current_span("request") as request:
        many(alias)
    [span] = batches(exporter)
    assert [link.context for link in span.links] == [request.get_span_context()]
    assert span.attributes["outbox.batch.commands"] == 7


@pytest.mark.parametrize("sampled", [True, False])
def test_without_a_sampled_trace_there_is_no_span(alias, account, exporter, sampled):
    if not sampled:
        tracer = TracerProvider(sampler=sampling.ALWAYS_OFF).get_tracer("test")
        with tracer.start_as_current_span("request"):
            many(alias)
    many(alias)
    assert batches(exporter) == []


def test_an_exporter_that_fails_costs_no_answer(alias, account, exporter, monkeypatch, caplog):
    def fail(*args, **options):
        raise ZeroDivisionError

    with trace.get_tracer("test").start_as_current_span("request"):
        monkeypatch.setattr(trace, "get_tracer", fail)
        assert len(many(alias)) == 7
    assert "Tracing a batch failed error=" in caplog.text


def test_an_api_that_another_thread_is_about_to_import(alias, account, ask, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", ModuleType("opentelemetry.trace"))
    ask("withdraw", {"amount": 1})
    assert not caplog.records
