"""Events in a project's own tests, inside the transaction of a test."""

from __future__ import annotations

import pytest

from outbox_app.events import publish, subscriber
from outbox_app.events.testing import assert_published, published_events, run_subscribers
from outbox_app.exceptions import OutboxError

pytestmark = pytest.mark.usefixtures("in_atomic")


def test_looking(alias):
    publish("a", "made", {"n": 1})
    publish("b", "made", {"n": 2})
    publish("a", "gone")
    assert [event.version for event in published_events(stream="a")] == [1, 2]
    assert [event.stream for event in published_events("made")] == ["a", "b"]
    assert_published("made", count=2)
    assert_published("made", {"n": 2}, stream="b")
    assert_published("lost", count=0)
    with pytest.raises(AssertionError, match=r"(?s)Expected 1 published of made; found 2.*b@1"):
        assert_published("made")


def test_running_inside_the_transaction_of_a_test(alias):
    seen = []

    @subscriber("some", types=["order.*"], partitions=4)
    def handle(events):
        seen.extend((event.stream, event.type) for event in events)
        for event in events:
            if event.type == "order.placed":
                publish(event.stream, "order.seen")

    publish("a", "order.placed")
    publish("b", "other")
    assert run_subscribers("some") == 2
    assert seen == [("a", "order.placed"), ("a", "order.seen")]
    assert run_subscribers("some") == 0
    publish("c", "order.gone")
    assert run_subscribers() == 1


def test_a_handler_that_raises_fails_the_test(alias):
    @subscriber("fails")
    def handle(events):
        publish("x", "effect")
        raise ZeroDivisionError

    publish("a", "made")
    with pytest.raises(ZeroDivisionError):
        run_subscribers()
    assert_published("effect", count=0)


def test_a_handler_may_take_its_events_out_of_the_list(alias):
    seen = []

    @subscriber("takes")
    def handle(events):
        while events:
            seen.append(events.pop(0).stream)

    publish("a", "made")
    publish("b", "made")
    assert run_subscribers() == 2
    assert run_subscribers() == 0
    assert seen == ["a", "b"]


def test_what_a_runner_refuses_fails_the_test(alias):
    @subscriber("asks_for_its_end")
    def handle(events):
        raise SystemExit

    @subscriber("returns_what_has_not_run")
    def later(events):
        return (publish("x", "effect") for _ in events)

    publish("a", "made")
    with pytest.raises(OutboxError, match="ends only its page"):
        run_subscribers("asks_for_its_end")
    with pytest.raises(OutboxError, match="which was not run"):
        run_subscribers("returns_what_has_not_run")


def test_events_without_end(alias):
    @subscriber("loops")
    def handle(events):
        publish("a", "again")

    publish("a", "made")
    with pytest.raises(AssertionError, match="no end"):
        run_subscribers()
