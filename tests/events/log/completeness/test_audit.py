"""On a log that is read by window, the check finds ids made by hand, deleted and restored rows."""

from __future__ import annotations

import pytest
from django.db.models import Max

from outbox_app.events.models import Event
from outbox_app.events.subscriptions.control import release

pytestmark = pytest.mark.django_db(transaction=True)


def test_a_deleted_event_in_the_middle(reading, log, published):
    reader = reading()
    published("a", "a", "a", "b")
    log.take("a", 2)
    assert reader.poll().handled == ["a:1", "b:1"]
    assert reader.gaps == [("a", 2, 2, "open")]


def test_a_deleted_event_that_was_handled(reading, log, published):
    """What was before the last event of a page is not looked at again; what it follows is."""
    reader = reading()
    published("a", "a", "a")
    assert reader.poll().handled == ["a:1", "a:2", "a:3"]
    log.take("a", 2)
    published("a")
    assert reader.poll().handled[3:] == ["a:4"]
    log.take("a", 4)
    published("a")
    assert reader.poll().handled[4:] == []
    assert reader.gaps == [("a", 4, 4, "open")]


def test_restored_rows_are_not_handled_again(reading, log, published, alias):
    reader = reading()
    published("a", "a", "a")
    reader.poll()
    ids = dict(Event.objects.using(alias).values_list("version", "id"))
    log.take("a", 1, 2)
    log.add("a", 1, id=ids[1])
    log.add("a", 2, id=ids[2])
    published("a")
    assert reader.poll().handled == ["a:1", "a:2", "a:3", "a:4"]
    log.take("a", 3)
    log.add("a", 3)  # with a position of today
    published("a")
    assert reader.poll().handled[4:] == ["a:5"]
    assert (reader.gaps, reader.parked) == ([], [])


def test_a_version_with_a_lower_position(reading, log, published, alias):
    reader = reading()
    published("x", "x", "x", "a")
    top = Event.objects.using(alias).aggregate(top=Max("id"))["top"]
    free = top - 3
    log.take("x", 1, 2, 3)
    log.add("a", 3, id=top + 5)
    assert reader.poll().handled == ["a:1"]
    log.add("a", 2, id=free)
    assert reader.later(60).handled == ["a:1", "a:2", "a:3"]
    assert reader.gaps == [("a", 2, 2, "filled")]


def test_positions_in_the_wrong_order_inside_a_page(reading, log, alias):
    reader = reading()
    log.add("a", 1, id=10)
    log.add("a", 3, id=11)
    log.add("b", 1, id=12)
    log.add("a", 2, id=13)
    assert reader.poll().handled == ["a:1", "a:2", "b:1", "a:3"]
    assert reader.gaps == []


def test_positions_in_the_wrong_order_across_pages(reading, log, alias):
    reader = reading(batch_size=2)
    log.add("a", 1, id=10)
    log.add("a", 3, id=11)
    log.add("b", 1, id=12)
    log.add("b", 2, id=13)
    log.add("a", 2, id=14)
    log.add("a", 4, id=15)
    assert reader.later(60).handled == ["a:1", "b:1", "b:2", "a:2", "a:3", "a:4"]
    assert reader.gaps == [("a", 2, 2, "filled")]


def test_order_across_streams_is_the_window_s(reading, published):
    reader = reading(batch_size=4)
    order = ["a", "b", "a", "c", "b", "a", "a", "c"]
    published(*order)
    assert [text[0] for text in reader.poll().handled] == order


def test_a_gap_that_nobody_looks_for_any_more_is_closed_with_the_release(reading, log):
    reading().poll()
    log.add("a", 1, 3)
    held = reading().poll()
    assert held.gaps == [("a", 2, 2, "open")]
    reader = reading(on_gap="off").later(60)
    assert (reader.handled, reader.parked) == (["a:1"], [("a", 2)])
    release("reads", using=reader.alias)
    assert reader.poll().handled == ["a:1", "a:3"]
    assert (reader.gaps, reader.parked) == ([("a", 2, 2, "closed")], [])
