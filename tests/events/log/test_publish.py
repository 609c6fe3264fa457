"""Publishing in the caller's transaction: versions, expectations, repeated calls, bad input."""

from __future__ import annotations

import json
import math
import sqlite3
from contextlib import contextmanager
from uuid import uuid4

import pytest
from django.db import OperationalError, connections, transaction
from django.db.models import TextField
from django.db.models.functions import Cast
from django.test.utils import isolate_apps

from outbox_app.events import ANY, NO_STREAM, NewEvent, publish, publish_many
from outbox_app.events.exceptions import (
    InvalidEvent,
    MessageIdConflict,
    UnknownLog,
    VersionConflict,
)
from outbox_app.events.log import publish as publishing
from outbox_app.events.log.reader import LogReader
from outbox_app.events.models import Event, EventLog, StreamHead
from outbox_app.events.signals import events_published
from outbox_app.exceptions import NotAtomic
from tests.one_database import no_statement

pytestmark = [pytest.mark.django_db, pytest.mark.usefixtures("in_atomic")]


@contextmanager
def hearing(hear):
    events_published.connect(hear)
    try:
        yield
    finally:
        events_published.disconnect(hear)


def rows(alias):
    return list(Event.objects.using(alias).order_by("id").values_list("stream", "version", "type"))


def test_versions_are_contiguous_in_each_stream(alias):
    publish("a", "made")
    publish_many([NewEvent("b", "made"), NewEvent("a", "changed"), NewEvent("a", "gone")])
    assert rows(alias) == [
        ("a", 1, "made"),
        ("b", 1, "made"),
        ("a", 2, "changed"),
        ("a", 3, "gone"),
    ]
    heads = StreamHead.objects.using(alias).order_by("stream").values_list("stream", "version")
    assert list(heads) == [("a", 3), ("b", 1)]


@pytest.mark.django_db(transaction=True)
def test_what_is_read_is_what_was_published(alias):
    id = uuid4()
    data = {"total": "12.50", "lines": [1, 2.5, None, True], "née": "日本 🐘 \\u0000 \\"}
    with transaction.atomic(using=alias):
        event = publish(
            "order-1", "order.placed", data, topic="eu", metadata={"user": 7}, message_id=id
        )
    reader = LogReader(Event, using=alias)
    [read] = reader.read(reader.window.start(0), 10).events
    assert (read.id, read.topic, read.stream, read.version) == (event.pk, "eu", "order-1", 1)
    assert (read.type, read.data, read.metadata) == ("order.placed", data, {"user": 7})
    assert read.message_id == id
    assert read.log == "outbox_event"
    assert read.recorded_at == Event.objects.using(alias).get().recorded_at
    reader.close()


def test_expected_versions(alias):
    assert publish("a", "made", expected_version=NO_STREAM).version == 1
    assert publish("a", "changed", expected_version=1).version == 2
    assert publish("a", "changed", expected_version=ANY).version == 3


@pytest.mark.parametrize(
    ("expected", "current"),
    [(NO_STREAM, 2), (1, 2), (3, 2)],
    ids=str,
)
def test_a_conflict_names_the_current_version_and_breaks_nothing(alias, expected, current):
    publish_many([NewEvent("a", "x"), NewEvent("a", "x")])
    with pytest.raises(VersionConflict, match="version 2") as caught:
        publish("a", "y", expected_version=expected)
    assert (caught.value.stream, caught.value.current) == ("a", current)
    assert publish("a", "z").version == 3


def test_a_stream_that_should_exist_does_not(alias):
    with pytest.raises(VersionConflict, match="to be at version 1; it has no event") as caught:
        publish("a", "y", expected_version=1)
    assert caught.value.current == 0
    assert not rows(alias)
    assert publish("a", "z").version == 1


def test_several_streams_all_or_none(alias):
    publish("b", "x")
    events = [NewEvent("a", "x"), NewEvent("b", "x"), NewEvent("c", "x")]
    with pytest.raises(VersionConflict) as caught:
        publish_many(events, expected_version={"a": NO_STREAM, "b": 7})
    assert caught.value.current == 1
    assert rows(alias) == [("b", 1, "x")]
    assert publish("a", "x", expected_version=NO_STREAM).version == 1
    publish_many(events[1:], expected_version={"b": 1})
    assert [row[:2] for row in rows(alias)] == [("b", 1), ("a", 1), ("b", 2), ("c", 1)]


@pytest.mark.parametrize("expected", [{}, {"b": 1, "c": NO_STREAM}])
def test_several_events_of_several_streams(alias, expected):
    publish("b", "x")
    events = publish_many([NewEvent(s, "x") for s in "cabcab"], expected_version=expected)
    versions = [("c", 1), ("a", 1), ("b", 2), ("c", 2), ("a", 2), ("b", 3)]
    assert [(event.stream, event.version) for event in events] == versions
    assert [row[:2] for row in rows(alias)] == [("b", 1), *versions]
    heads = StreamHead.objects.using(alias).order_by("stream").values_list("stream", "version")
    assert list(heads) == [("a", 2), ("b", 3), ("c", 2)]


@pytest.mark.parametrize("expected", [{}, {"b": NO_STREAM}])
def test_streams_are_locked_in_one_order(alias, expected):
    """Or two transactions that write the same ones would each wait for the other."""
    locked: list[str] = []

    def look(execute, sql, params, many, context):
        if "outbox_stream" in sql and not sql.startswith("SELECT"):
            locked.extend(value for value in params if value in ("a", "b", "c"))
        return execute(sql, params, many, context)

    with connections[alias].execute_wrapper(look):
        publish_many([NewEvent(s, "x") for s in "cab"], expected_version=expected)
    assert locked == ["a", "b", "c"]


def test_the_same_message_again_is_returned_as_it_is(alias):
    id = uuid4()
    first = publish("a", "made", {"n": 1}, message_id=id)
    for same in ({"n": 1}, {"n": 1.0}):  # JSON has one kind of numbers
        again = publish("a", "made", same, message_id=str(id))
        assert (again.pk, again.version) == (first.pk, 1)
    assert rows(alias) == [("a", 1, "made")]


def test_more_messages_again_than_one_statement_may_have_parameters(alias):
    """SQLite takes 32,766 unless built otherwise, PostgreSQL 65,535 from server-side binding."""
    connection = connections[alias].connection
    kind = sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER
    before = connection.setlimit(kind, 1050) if alias == "default" else None
    events = [NewEvent("a", "made", message_id=uuid4()) for _ in range(1100)]
    try:
        first = publish_many(events)
        assert [row.pk for row in publish_many(events)] == [row.pk for row in first]
    finally:
        if before is not None:
            connection.setlimit(kind, before)


OTHERS = [
    {"stream": "b"},
    {"type": "gone"},
    {"data": {"n": 2}},
    {"data": {"n": True}},
    {"topic": "eu"},
    {"metadata": {"user": 7}},
]


def test_the_same_message_id_for_another_event(alias):
    given = {"stream": "a", "type": "made", "data": {"n": 1}, "message_id": (id := uuid4())}
    publish(**given)
    for other in OTHERS:
        with pytest.raises(MessageIdConflict, match=str(id)):
            publish(**given | other)
    assert publish("a", "made").version == 2


def test_a_conflict_beside_a_message_that_is_there(alias):
    id = uuid4()
    publish("a", "made", message_id=id)
    events = [NewEvent("a", "made", message_id=id), NewEvent("a", "changed")]
    with pytest.raises(VersionConflict):
        publish_many(events, expected_version=NO_STREAM)
    assert rows(alias) == [("a", 1, "made")]


def test_only_what_was_written_is_said(alias):
    """To projections and those who wait: neither what is refused nor what was there before."""
    id, said = uuid4(), []

    def hear(sender, using, events, **kwargs):
        said.append([(event.stream, event.version) for event in events])

    with hearing(hear):
        publish("a", "made", message_id=id)
        with pytest.raises(VersionConflict):
            publish("a", "made", expected_version=NO_STREAM)
        publish("a", "made", message_id=id)
    assert said == [[("a", 1)]]


def test_a_statement_that_fails_takes_the_transaction_with_it(alias, monkeypatch):
    """A caller who goes on could commit without the events: a lock's timeout undoes no more."""

    def fail(*args, **kwargs):
        raise OperationalError("Lock wait timeout exceeded")

    monkeypatch.setattr(publishing, "insert", fail)
    with pytest.raises(OperationalError):
        publish_many([NewEvent("a", "made"), NewEvent("a", "changed")])
    assert transaction.get_rollback(using=alias)
    transaction.set_rollback(False, using=alias)


def test_two_events_with_one_message_id(alias):
    id = uuid4()
    with pytest.raises(InvalidEvent, match="same message_id"):
        publish_many([NewEvent("a", "x", message_id=id), NewEvent("b", "x", message_id=id)])
    assert not rows(alias)


@pytest.mark.django_db(transaction=True)
def test_outside_a_transaction(alias, settings):
    with pytest.raises(NotAtomic, match="publish"):
        publish("a", "made")
    settings.OUTBOX = {**settings.OUTBOX, "OUTSIDE": "stage"}
    publish("a", "made")
    with pytest.raises(VersionConflict):
        publish_many([NewEvent("b", "x"), NewEvent("a", "x")], expected_version={"a": 5})
    assert rows(alias) == [("a", 1, "made")]
    assert not StreamHead.objects.using(alias).filter(stream="b").exists()


def deep(levels):
    value = 1
    for _ in range(levels):
        value = [value]
    return value


def circle():
    value = []
    value.append(value)
    return value


BAD_INPUT = [
    ({"data": math.nan}, "data cannot be stored as JSON"),
    ({"data": [math.inf]}, "data cannot be stored as JSON"),
    ({"metadata": {"x": object()}}, "metadata cannot be stored as JSON"),
    ({"data": circle()}, "data cannot be stored as JSON"),
    ({"data": deep(31)}, "31 levels"),
    ({"data": deep(900)}, "data cannot be stored|levels"),
    ({"data": "a\x00b"}, "NUL"),
    ({"data": {"a\x00b": 1}}, "NUL"),
    ({"data": "\ud800"}, "data cannot be stored as JSON"),
    ({"data": "x" * 300_000}, "MAX_EVENT_BYTES"),
    ({"data": [1e300] * 1000}, "MAX_EVENT_BYTES"),  # each becomes 301 digits
    ({"data": [1e300] * 50_000}, "data is 400000 bytes"),  # too large before that
    ({"stream": ""}, "stream must not be empty"),
    ({"stream": 5}, "stream must be a string"),
    ({"stream": "x" * 256}, "256 characters"),
    ({"stream": "a\x00"}, "NUL"),
    ({"stream": "\udcff"}, "not valid Unicode"),
    ({"type": ""}, "type must not be empty"),
    ({"type": "$tombstone"}, "type must not be"),
    ({"stream": "$tombstone"}, "stream must not be"),
    ({"topic": None}, "topic must be a string"),
    ({"message_id": "abc"}, "message_id must be a UUID"),
    ({"message_id": 5}, "message_id must be a UUID"),
    *(
        ({"expected_version": bad}, "expected_version must be an integer")
        for bad in (-1, 0, "1", True, 2**63, 1.0, None)
    ),
    ({"expected_version": {"other": 1}}, "names the stream 'other'"),
    ({"expected_version": {5: 1, "other": 1}}, "names the stream 5"),
]


@pytest.mark.any_database
def test_bad_input_is_refused_before_any_statement(alias):
    with no_statement(alias):
        for arguments, says in BAD_INPUT:
            with pytest.raises(InvalidEvent, match=says):
                publish(**{"stream": "a", "type": "made", **arguments})


@pytest.mark.parametrize("log", [EventLog, StreamHead, "outbox_event", None])
def test_what_is_no_log(alias, log):
    with pytest.raises(UnknownLog, match="EventLog"):
        publish("a", "made", log=log)


def test_a_proxy_is_no_log(alias):
    """Views of the log would not be given what is published to it."""
    with isolate_apps("tests"):

        class Proxy(Event):
            class Meta:
                app_label = "tests"
                proxy = True

    with pytest.raises(UnknownLog, match="no proxy"):
        publish("a", "made", log=Proxy)


def test_thirty_levels_and_escapes_are_no_fault(alias):
    brackets = {"text": "[" * 200 + '\\"' + "{" * 200}
    publish("a", "made", {"deep": deep(29), **brackets, "escaped": "\\u0000"})
    event = Event.objects.using(alias).get()
    assert event.data["escaped"] == "\\u0000"
    assert event.data["text"] == brackets["text"]


@pytest.mark.parametrize("stream", ["A", "a ", "á"])
def test_streams_are_told_apart_byte_by_byte(alias, stream):
    publish("a", "made")
    assert publish(stream, "made").version == 1


def test_what_the_database_gives_is_on_the_row(alias):
    given = publish_many([NewEvent(f"s{i}", "made") for i in range(300)])
    rows = Event.objects.using(alias).order_by("id")
    assert [e.pk for e in given] == [e.pk for e in rows]
    assert [e.stream for e in rows] == [f"s{i}" for i in range(300)]
    assert given[-1].recorded_at == rows.last().recorded_at
    assert given[0].txid == rows[0].txid
    assert (given[0].txid > 0) == (alias == "postgres")
    assert given[0].to_cloudevent() == rows[0].to_cloudevent()
    assert not given[0]._state.adding


def test_events_larger_than_a_packet_together(alias):
    publish_many([NewEvent("a", "made", {"x": '"' * 120_000}) for _ in range(100)])
    assert Event.objects.using(alias).count() == 100


def test_cost(alias, django_assert_num_queries):
    single = 1 if connections[alias].vendor == "postgresql" else 2
    # MySQL has no RETURNING: the versions and the ids are read.
    read = 0 if connections[alias].features.can_return_rows_from_bulk_insert else 1
    with django_assert_num_queries(single + 2 * read, connection=connections[alias]):
        publish("a", "made")
    with django_assert_num_queries(single + read, connection=connections[alias]):
        publish("a", "made", expected_version=1)
    with django_assert_num_queries(2 + 2 * read, connection=connections[alias]):
        publish_many([NewEvent(f"s{i % 10}", "made") for i in range(50)])
    assert Event.objects.using(alias).count() == 52


def test_keys_that_become_the_same_string_are_stored_once(alias):
    event = publish("a", "made", {1: "number", "1": "text", "at": (1, 2)})
    assert event.data == {"1": "text", "at": [1, 2]}
    rows = Event.objects.using(alias).annotate(text=Cast("data", TextField()))
    stored = json.loads(rows.get().text, object_pairs_hook=lambda pairs: sorted(map(list, pairs)))
    assert stored == [["1", "text"], ["at", [1, 2]]]
