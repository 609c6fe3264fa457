"""RabbitMQ's replies to the messages of a batch: in any order, late, or missing."""

from __future__ import annotations

from collections import defaultdict
from contextlib import nullcontext
from types import SimpleNamespace
from uuid import uuid4

import amqp
import pytest
from amqp.exceptions import NotFound, UnexpectedFrame
from kombu.transport import pyamqp

from outbox_app.jobs.drain.amqp_batch import MAX_KEPT, AmqpBatch, Unconfirmed
from outbox_app.jobs.drain.batch import Row
from outbox_app.jobs.drain.outcome import PublishResult, decode_rows
from outbox_app.jobs.message import Message

KINDS = ("priority", "content_type", "content_encoding", "headers")


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


class Channel:
    """kombu's channel, as far as a batch needs it."""

    prepare_message = pyamqp.Channel.prepare_message

    def __init__(self, connection):
        self.connection = connection


@pytest.fixture
def broker():
    return Broker()


@pytest.fixture
def flush(broker):
    """``flush(says, *routes)``: the outcomes of messages with these routing keys."""

    def send(says, *routes, exchange=""):
        broker.says = says
        batch = AmqpBatch(SimpleNamespace(connection=broker), seconds=60)
        for route in routes:
            message = amqp.Message("[]", correlation_id=f"id of {route}")
            batch.publish(message, exchange=exchange, routing_key=route)
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


def made(headers, *, envelope=None, body=b"[]", **options):
    """A row whose message is finished, as Celery makes it."""
    task_id = str(uuid4())
    properties = {"correlation_id": task_id, "reply_to": "reply", "delivery_mode": 2}
    kinds = {"content_type": "application/json", "content_encoding": "utf-8"}
    message = Message("", "celery", headers, properties, **kinds, **options)
    envelope = (envelope or str)(message.dumps())
    return Row(1, 0, "", "shop", "note", task_id, "celery", body, envelope)


def prepared(rows):
    outcome = PublishResult()
    return decode_rows(rows, None, now=None, outcome=outcome), outcome.refused


def test_frames_are_those_of_py_amqp(broker):
    """Those of messages that are alike are filled in, in what differs."""
    values = [None, True, 1, 1.0, -0.0, 0, False, "", "ü", "None", 2**40, [], [None], [True], [1]]
    values += [{}, {"a": [1.0, {"b": None}]}, "x" * 300, [1], True, 1.0, None, "'", "%s\0"]
    rows = [made({"id": number, "x": value}) for number, value in enumerate(values)]
    rows += [made({"y" * 255: 1}), made({"b": 1}, body=b""), made({"p": 1}, priority=5)]
    rows += [made({"big": 1}, body=b"x" * 100_000) for _ in range(2)] + [made({"p": 2}, priority=5)]
    items, refused = prepared(rows)
    assert not refused
    assert len({id(item.alike) for item in items}) == 2
    channel = Channel(broker)
    ours, theirs = (AmqpBatch(channel, seconds=60) for _ in range(2))
    packed = bytearray()
    broker.transport.write = packed.extend
    for item in items:
        assert ours.takes(item)
        kinds = (getattr(item.message, name) for name in KINDS)
        message = channel.prepare_message(item.row.body, *kinds, item.message.properties)
        theirs.publish(message, exchange="", routing_key="celery")
    assert packed + ours._packed == theirs._packed
    assert ours._sent == theirs._sent
    assert packed, "what was ready was sent"
    assert all(len(value) < MAX_KEPT for _, value in ours._frames._headers), "memory is bounded"


def test_what_fits_no_frame_goes_by_py_amqp(broker):
    broker.frame_max = 4096
    items, _ = prepared([made({"x": "x" * 4096}), made({"x": 0}, body=b"x" * 4090), made({"x": 1})])
    batch = AmqpBatch(Channel(broker), seconds=60)
    assert [batch.takes(item) for item in items] == [False, False, True]
    assert len(batch._sent) == 1


@pytest.mark.parametrize(
    "headers", ['{"a": 1} x', '{"a": 1}, {"b": 1}', ' {"a": 1', "[1]", "", '"a"', "null"]
)
def test_headers_that_are_damaged_are_refused(headers):
    """No worker could read them, and all else of the envelope is as that of the others."""

    def damage(text):
        return text.replace('{"a": 1}', headers)

    rows = [made({"a": 1}), made({"a": 1}, envelope=damage), made({"a": 1})]
    assert rows[0].envelope != rows[1].envelope
    items, refused = prepared(rows)
    assert [item.row for item in items] == rows[::2]
    assert [row for row, _ in refused] == [rows[1]]


def test_a_slice_that_does_not_leave_makes_all_unknown(broker):
    """Some of it may have: nothing is taken for unsent, and the connection is dropped."""

    def write(data):
        raise TimeoutError("full")

    broker.transport.write = write
    items, _ = prepared([made({"a": number}, body=b"x" * 50_000) for number in range(4)])
    batch = AmqpBatch(Channel(broker), seconds=60)
    taken = [batch.takes(item) for item in items[:3]]
    with pytest.raises(TimeoutError):
        batch.takes(items[3])
    batch.discard()
    batch.close()
    assert taken == [True] * 3
    assert (batch.begun, batch.flushed, batch.answers) == (True, False, [])
    assert not broker.closed
