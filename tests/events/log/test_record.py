"""Records decode a value when it is read, and otherwise behave like their decoded values."""

from __future__ import annotations

import copy
import pickle
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connections

from outbox_app.events.log.reader import LogReader
from outbox_app.events.log.record import RecordedEvent, recorded
from outbox_app.events.models import Event

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_record_is_what_it_decodes_to(alias, published):
    data = {"text": "ä%s", "items": [1, 2.5, None, {"a": True}]}
    published("a", data=data)
    reader = LogReader(Event, using=alias)
    [event], _ = reader.read(reader.window.start(0), 10)
    wanted = recorded(Event.objects.using(alias).get())
    assert type(wanted) is RecordedEvent
    assert isinstance(event, RecordedEvent)
    assert [getattr(event, name) for name in event._fields] == list(wanted)
    assert [type(value) for value in event] == [type(value) for value in wanted]
    assert event.recorded_at.utcoffset() == wanted.recorded_at.utcoffset()
    assert event == wanted
    assert wanted == event
    assert (event != wanted) is False
    [again], _ = reader.read(reader.window.start(0), 10)
    [other], _ = reader.read(reader.window.start(0), 10)
    assert again == other  # neither of them is decoded yet
    assert tuple(event) == tuple(wanted)
    assert event[5] == data
    assert event[:9] == wanted[:9]
    assert data in event
    assert event.index(data) == 5
    assert (lambda *fields: fields)(*event) == tuple(wanted)
    assert repr(event) == repr(wanted)
    assert event.to_dict() == wanted.to_dict()
    assert event.to_cloudevent() == wanted.to_cloudevent()
    assert event.to_cloudevent("/shop")["source"] == "/shop"
    assert event._asdict() == wanted._asdict()
    assert event._replace(version=7) == wanted._replace(version=7)
    for same in (pickle.loads(pickle.dumps(event)), copy.copy(event), copy.deepcopy(event)):
        assert same == wanted
    reader.close()


def test_the_time_of_a_cloudevent_has_its_zone(alias, published, settings):
    """Also where ``USE_TZ`` is off: no zone is not UTC."""
    settings.OUTBOX = {**settings.OUTBOX, "DATABASE": alias}
    settings.USE_TZ, settings.TIME_ZONE = False, "Asia/Tokyo"
    [given] = published("a")
    row = Event.objects.using(alias).get()
    for event in (given, row, recorded(row)):
        time = datetime.fromisoformat(event.to_cloudevent()["time"])
        assert abs(time - datetime.now(UTC)) < timedelta(minutes=30)
    unsaved = Event(message_id=row.message_id, recorded_at=datetime(2026, 5, 1))
    assert unsaved.to_cloudevent()["time"] == "2026-05-01T00:00:00+09:00"


def test_what_nobody_looks_at_is_not_decoded(alias, published):
    published("a", data={"text": "x"})
    reader = LogReader(Event, using=alias)
    [event], _ = reader.read(reader.window.start(0), 10)
    kept = vars(event)
    assert "message_id" not in kept
    assert "recorded_at" not in kept
    # Only PostgreSQL's type holds nothing that is no JSON.
    assert ("data" in kept) == (connections[alias].vendor != "postgresql")
    assert event.data is event.data
    reader.close()
