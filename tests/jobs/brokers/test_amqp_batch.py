"""What RabbitMQ says of each message of a batch, in any order, late, or not at all."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace

import amqp
import pytest
from amqp.exceptions import NotFound, UnexpectedFrame

from outbox_app.jobs.drain.amqp_batch import AmqpBatch, Unconfirmed


class Broker:
    """A connection on which RabbitMQ says what a test tells it to, one thing at a time."""

    frame_max, bytes_sent = 131072, 0

    def __init__(self):
        self.transport = SimpleNamespace(
            having_timeout=lambda seconds: nullcontext(), write=lambda data: None
        )
        self.says = []
        self.closed = []

    def channel(self):
        self.events = defaultdict(set)
        return SimpleNamespace(
            channel_id=2,
            events=self.events,
            confirm_select=lambda: None,
            close=lambda: self.closed.append(True),
        )

    def drain_events(self, timeout):
        assert 0 < timeout <= 60
        if not self.says:
            raise TimeoutError("nothing more")
        event, *arguments = self.says.pop(0)
        for heard in self.events[f"basic_{event}"]:
            heard(*arguments)


@pytest.fixture
def broker():
    return Broker()


@pytest.fixture
def flush(broker):
    """``flush(says, *routes)``: what became of messages with these routing keys."""

    def send(says, *routes, exchange=""):
        broker.says = says
        batch = AmqpBatch(SimpleNamespace(connection=broker), seconds=60)
        for route in routes:
            message = amqp.Message("[]", correlation_id=f"id of {route}")
            batch.publish(message, exchange=exchange, routing_key=route, mandatory=True)
        try:
            batch.flush()
        finally:
            broker.answers = [[type(each).__name__ for each in a] for a in batch.answers]
            batch.close()
        return broker.answers

    return send


def returned(route, correlation_id=None):
    message = amqp.Message("[]", correlation_id=correlation_id or f"id of {route}")
    return ("return", NotFound("NO_ROUTE"), "", route, message)


TAKEN, NACKED, GONE = ["NoneType"], ["MessageNacked"], ["NotFound"]


@pytest.mark.parametrize(
    ("says", "answers"),
    [
        ([("ack", 3, True)], [TAKEN] * 3),
        ([("ack", 3, False), ("ack", 2, True)], [TAKEN] * 3),
        ([("ack", 1, True), ("ack", 3, False), ("ack", 2, False)], [TAKEN] * 3),
        ([("nack", 2, True), ("ack", 3, False)], [NACKED, NACKED, TAKEN]),
        ([("ack", 2, False), ("nack", 3, True)], [NACKED, TAKEN, NACKED]),
        ([returned("b"), ("ack", 3, True)], [TAKEN, GONE, TAKEN]),
        ([("ack", 1, False), returned("c"), ("ack", 3, True)], [TAKEN, TAKEN, GONE]),
    ],
)
def test_every_confirm_is_that_of_its_message(broker, flush, says, answers):
    assert flush(says, "a", "b", "c") == answers
    assert broker.closed


def test_messages_that_are_alike_are_returned_in_their_order(flush):
    says = [returned("a"), returned("a"), ("ack", 3, True)]
    assert flush(says, "a", "a", "b") == [GONE, GONE, TAKEN]
    says = [("ack", 1, False), returned("a"), ("ack", 3, True)]
    assert flush(says, "a", "a", "b") == [TAKEN, GONE, TAKEN]


def test_another_queue_may_have_taken_what_one_refused(flush):
    says = [("nack", 1, False), ("ack", 2, False)]
    assert flush(says, "a", "b", exchange="both") == [[*TAKEN, *NACKED], TAKEN]


def test_what_has_no_answer_is_unconfirmed(broker, flush):
    says = [("ack", 2, False), returned("c"), ("nack", 4, False)]
    with pytest.raises(TimeoutError):
        flush(says, "a", "b", "c", "d", "e")
    open_ = [Unconfirmed.__name__]
    assert broker.answers == [open_, TAKEN, GONE, NACKED, open_]
    assert not broker.closed  # the connection is dropped


def test_what_was_never_sent_is_not_taken_for_something_else(broker, flush):
    with pytest.raises(UnexpectedFrame, match="not sent"):
        flush([returned("a", "another id"), ("ack", 1, False)], "a")
    assert broker.answers == [[Unconfirmed.__name__]]
