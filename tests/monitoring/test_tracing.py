"""One trace from the request through the drain to the worker, under real instrumentation.

Instrumentation applies to a whole process, so each test starts a process.
"""

from __future__ import annotations

import json
import sys

import pytest

from tests import forking
from tests.patience import patience

pytestmark = pytest.mark.django_db(transaction=True)
#: What no database has a part in.
only_here = pytest.mark.parametrize("alias", ["default"])


@pytest.fixture
def traced(alias, environment):
    """``traced("scenario")``: run it in a separate process. Returns its report."""

    def run(scenario, **variables):
        command = [sys.executable, "-m", "tests.monitoring.traced", scenario]
        done = forking.run(
            command,
            env={**environment(alias), "PYTHONWARNINGS": "ignore", **variables},
            capture_output=True,
            text=True,
            timeout=patience(100),
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def named(spans, name):
    return [span for span in spans if span["name"] == name]


def test_one_trace_from_the_request_through_the_drain_to_the_worker(traced, redis_url):
    told = traced("whole_way", BROKER_URL=redis_url)

    assert told["tally"] == {"published": 2, "dead": 1}
    says_one_trace(told["spans"])
    says_what_and_where_to(told["spans"])
    ended_while_staging(told)


def says_one_trace(spans):
    assert {span["trace"] for span in spans} == {spans[0]["trace"]}
    [request] = named(spans, "GET orders/")
    assert (request["kind"], request["parent"]) == ("SERVER", None)

    # Three were staged, and one was refused at once: each span is the request's own child.
    staged = named(spans, "apply_async/shop.receipt")
    assert [span["parent"] for span in staged] == [request["id"]] * 3
    [lost] = named(spans, "apply_async/shop.refused")
    assert lost["parent"] == request["id"]

    # The message is as it was staged: what publishes it and what executes it have one parent.
    by_task_id = {span["attributes"]["messaging.message.id"]: span for span in staged}
    published = [s for s in named(spans, "outbox publish") if s["status"] == "UNSET"]
    executed = named(spans, "run/shop.receipt")
    assert len(published) == len(executed) == 2
    for span in [*published, *executed]:
        assert span["parent"] == by_task_id[span["attributes"]["messaging.message.id"]]["id"]
    assert {span["kind"] for span in published} == {"PRODUCER"}
    assert {span["kind"] for span in executed} == {"CONSUMER"}
    assert {s["parent"] for s in named(spans, "send the mail")} == {s["id"] for s in executed}

    [failed] = [s for s in named(spans, "outbox publish") if s["status"] == "ERROR"]
    assert failed["parent"] == lost["id"]
    assert failed["description"] == "Unroutable"


def says_what_and_where_to(spans):
    attributes = named(spans, "outbox publish")[0]["attributes"]
    assert attributes.pop("outbox.waited_seconds") >= 0
    assert attributes.pop("messaging.message.id")
    assert attributes.pop("messaging.destination.name").startswith("traced-")
    assert attributes == {
        "messaging.operation.name": "publish",
        "messaging.operation.type": "send",
        "messaging.batch.message_count": 3,
        "celery.task_name": "shop.receipt",
    }
    assert all(span["seconds"] > 0 for span in named(spans, "outbox publish"))


def ended_while_staging(told):
    """As the drain is in another process, where nobody could end a span."""
    assert len(named(told["staged"], "apply_async/shop.receipt")) == 3
    assert told["kept"] == [0, 0]
    # No "no existing span found" from the drain either.
    assert [line for line in told["logged"] if "opentelemetry" in line] == []
    assert "refused: InvalidJob" in told["logged"]


@only_here
def test_spans_are_made_of_sampled_traces_only_and_not_of_all(alias, traced):
    told = traced("bounds")
    assert told["tally"] == {"published": 9, "dead": 0}
    published = named(told["spans"], "outbox publish")
    callers = [span["id"] for span in named(told["spans"], "caller")]
    assert [span["parent"] for span in published] == callers[:3]
    assert [line for line in told["logged"] if "Tracing a batch failed" in line] == []


@only_here
def test_a_job_that_was_not_sent_has_no_span_and_the_next_one_has(alias, traced):
    told = traced("blocked")
    assert told["tally"] == {"published": 1, "dead": 2}
    ids = [s["id"] for s in named(told["spans"], "apply_async/shop.note")]
    published = {s["parent"]: s["status"] for s in named(told["spans"], "outbox publish")}
    assert published == {ids[0]: "ERROR", ids[2]: "UNSET"}


@only_here
def test_what_fails_while_tracing_stops_no_publish(alias, traced):
    told = traced("broken")
    assert told["tally"] == {"published": 1, "dead": 0}
    failed = 'outbox_app.drain: Tracing a batch failed error="RuntimeError: broken"'
    assert failed in told["logged"]


@only_here
def test_spans_that_take_their_time_hold_no_row_and_are_cut(alias, traced):
    told = traced("slow")
    assert told["tally"] == {"published": 3, "dead": 0}
    assert told["left"] == [0]  # one span, when all rows were deleted


@only_here
def test_a_provider_that_cannot_be_made_stops_no_publish(alias, traced):
    told = traced("unprovided")
    assert told["tally"] == {"published": 1, "dead": 0}
    [line] = [line for line in told["logged"] if "Tracing a batch failed" in line]
    assert line.startswith("outbox_app.drain: ")
