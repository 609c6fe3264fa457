"""A missing version holds up only its own stream; all other events are handled in order."""

from __future__ import annotations

import pytest
from django.db import OperationalError, connections
from django.test.utils import CaptureQueriesContext

from outbox_app.events.exceptions import GapNotSkippable
from outbox_app.events.models import Cursor, DeliveredVersion, Gap, ParkedStream
from outbox_app.events.signals import stream_parked
from outbox_app.events.subscriptions import parking, version_gaps
from outbox_app.events.subscriptions.skips import skip_gap
from tests.events.log.own_log.models import Ledger

from .conftest import WAYS, Log

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.parametrize("way", WAYS),
]


def test_nothing_is_missing(reading, log, way, published):
    reader = reading(**way)
    published("a", "b", "a")
    reader.poll()
    published("a", "b")
    assert reader.poll().handled == ["a:1", "b:1", "a:2", "a:3", "b:2"]
    assert (reader.gaps, reader.parked) == ([], [])


def test_a_hole_holds_its_stream_until_it_is_filled(reading, log, way):
    reader = reading(**way)
    log.add("a", 1, 2)
    log.add("b", 1)
    log.add("a", 4)
    reader.poll()
    log.add("b", 2)
    log.add("a", 5)
    assert reader.later(1).handled == ["a:1", "a:2", "b:1", "b:2"]
    assert reader.gaps == [("a", 3, 3, "open")]
    assert reader.parked == [("a", 3)]
    log.add("a", 3)
    assert reader.later(5).handled[4:] == ["a:3", "a:4", "a:5"]
    assert reader.gaps == [("a", 3, 3, "filled")]
    assert reader.parked == []
    log.add("a", 6)
    assert reader.poll().handled[7:] == ["a:6"]


def test_an_error_at_what_filled_a_hole_is_over_when_that_is_handled(reading, log, way):
    """Also where no other event comes: the trouble of its process and an exit code tell of it."""
    reader = reading(**way)
    log.add("a", 1, 3)
    reader.later(1)
    reader.broken.add("a")
    log.add("a", 2)
    reader.later(5)
    assert reader.partition.error == "ValueError: a"
    reader.broken.clear()
    assert reader.later(600).handled == ["a:1", "a:2", "a:3"]
    assert reader.partition.error == ""


def test_what_was_handled_between_two_of_a_page_is_not_missing(reading, log, way):
    """Versions were put in by hand behind a later one."""
    reader = reading(batch_size=3, **way)
    log.add("a", 4)
    reader.poll()
    log.add("a", 1, 2, 5, 3)
    assert reader.poll().handled[-1] == "a:5"
    assert (reader.gaps, reader.parked) == ([], [])


def test_a_hole_inside_a_page_and_two_of_them(reading, log, way):
    reader = reading(**way)
    log.add("a", 1, 3, 4, 6)
    log.add("b", 1)
    assert reader.poll().handled == ["a:1", "b:1"]
    log.add("a", 2)
    assert reader.later(1).handled[2:] == ["a:2", "a:3", "a:4"]
    assert reader.gaps == [("a", 2, 2, "filled"), ("a", 5, 5, "open")]
    log.add("a", 5)
    assert reader.later(1).handled[5:] == ["a:5", "a:6"]
    assert {state for *_, state in reader.gaps} == {"filled"}


def test_a_stream_whose_row_was_deleted_makes_no_turn_without_a_pause(reading, log, way, alias):
    reader = reading(**way)
    log.add("a", 1, 3)
    reader.poll()
    ParkedStream.objects.using(alias).all().delete()
    reader.later(1)
    assert reader.partition.pause > 0


def test_a_stream_that_waits_in_a_log_that_is_read_no_more(reading, log, way, alias):
    """It turned without a pause."""
    reader = reading(logs=["outbox_events.Event", Ledger], **way)
    ledger = Log(alias, Ledger)
    ledger.add("a", 1)
    ledger.add("a", 3)
    reader.poll()
    assert reader.parked == [("a", 2)]
    reader = reading(**way)
    log.add("b", 1)
    assert reader.poll().handled == ["a:1", "b:1"]
    assert reader.parked == [("a", 2)]
    ledger.add("a", 2)
    assert reading(logs=["outbox_events.Event", Ledger], **way).later(5).handled[2:] == [
        "a:2",
        "a:3",
    ]


def test_each_stream_has_its_turn_if_looks_take_longer_than_the_pause(
    reading, log, way, monkeypatch
):
    monkeypatch.setattr(version_gaps, "MAX_LOOKS", 1)
    reader = reading(max_backtracks=1, **way)
    log.add("a", 1, 3)
    log.add("b", 1, 3)
    assert reader.later(10).handled == ["a:1", "b:1"]
    log.add("b", 2)
    for _ in range(4):
        reader.now += 2 * version_gaps.PARKED_PAUSE
        reader.partition.run_once()
    assert reader.handled[2:] == ["b:2", "b:3"]


def test_a_hole_that_is_filled_in_part(reading, log, way):
    reader = reading(**way)
    log.add("a", 1, 5)
    assert reader.poll().gaps == [("a", 2, 4, "open")]
    log.add("a", 2)
    log.add("a", 4)
    assert reader.later(1).handled == ["a:1", "a:2"]
    assert reader.gaps == [("a", 2, 2, "filled"), ("a", 3, 3, "open")]
    log.add("a", 3)
    assert reader.later(1).handled == ["a:1", "a:2", "a:3", "a:4", "a:5"]


def test_what_is_pruned_from_the_front_is_no_hole(reading, log, way):
    reader = reading(**way)
    log.add("a", 7, 8)
    assert reader.poll().handled == ["a:7", "a:8"]
    log.take("a", 7)
    log.add("a", 9)
    log.add("a", 11)
    assert reader.poll().handled == ["a:7", "a:8", "a:9"]
    assert reader.gaps == [("a", 10, 10, "open")]


def test_versions_that_the_filter_leaves_out_are_no_hole(reading, log, way):
    reader = reading(types=["order.*"], topics=["x", "y"], **way)
    log.add("a", 1, type="order.made", topic="x")
    log.add("a", 2, type="ordered", topic="x")
    log.add("a", 3, type="order.made", topic="z")
    log.add("a", 4, type="order.made", topic="y")
    assert reader.poll().handled == ["a:1", "a:4"]
    log.add("a", 5, type="other", topic="x")
    reader.poll()
    log.add("a", 7, type="order.paid", topic="x")
    assert reader.poll().gaps == [("a", 6, 6, "open")]
    log.add("a", 6, type="other", topic="x")
    assert reader.later(1).handled == ["a:1", "a:4", "a:7"]


def test_it_backs_off_and_parks(reading, log, way, alias):
    parked = []
    reader = reading(max_backtracks=9, **way)
    log.add("a", 1, 3)
    reader.poll()
    pauses = []

    def note(parked_row=None, **kwargs):
        parked.append(kwargs["parked"].stream)

    stream_parked.connect(note)
    try:
        for _ in range(11):
            pauses.append(round(reader.partition.pause, 3))
            reader.now += reader.partition.pause
            reader.poll()
    finally:
        stream_parked.disconnect(note)
    assert pauses == [0.05, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5, 5, 30, 30]
    assert parked == ["a"]
    gap = Gap.objects.using(alias).get()
    assert (gap.attempts, gap.state, gap.subscription, gap.log) == (11, "open", "reads", gap.log)
    assert gap.seen_at is not None
    # What a person presses for a parked stream is one look now.
    ParkedStream.objects.using(alias).update(released=True)
    reader.poll()
    assert not ParkedStream.objects.using(alias).get().released
    assert reader.handled == ["a:1"]
    log.add("a", 2)
    ParkedStream.objects.using(alias).update(released=True)
    assert reader.poll().handled == ["a:1", "a:2", "a:3"]


def test_it_skips_by_itself_where_it_was_told_to(reading, log, way, alias):
    reader = reading(on_gap="skip", max_backtracks=3, **way)
    log.add("a", 1, 3)
    assert reader.later(0.2).handled == ["a:1"]
    assert reader.later(1).handled == ["a:1", "a:3"]
    gap = Gap.objects.using(alias).get()
    assert (gap.state, gap.settled_by) == ("skipped", "subscription reads")
    assert "3 looks" in gap.reason
    assert gap.settled_at is not None
    log.add("a", 2)  # too late
    log.add("a", 4)
    assert reader.poll().handled == ["a:1", "a:3", "a:4"]
    assert reader.parked == []


def test_a_person_skips(reading, log, way, alias):
    reader = reading(**way)
    log.add("a", 1, 4, 5, 7)
    reader.poll()
    [gap] = Gap.objects.using(alias).open()
    with pytest.raises(GapNotSkippable, match="a name and a reason"):
        skip_gap(gap.pk, by="ann", reason=" ", using=alias)
    skipped = skip_gap(gap.pk, by="ann", reason="deleted on purpose", using=alias)
    assert (skipped.state, skipped.settled_by) == ("skipped", "ann")
    assert skipped.reason == "deleted on purpose"
    assert reader.poll().handled == ["a:1", "a:4", "a:5"]
    assert reader.gaps == [("a", 2, 3, "skipped"), ("a", 6, 6, "open")]
    with pytest.raises(GapNotSkippable, match=f"Gap {gap.pk} is skipped"):
        skip_gap(gap.pk, by="ann", reason="again", using=alias)
    with pytest.raises(GapNotSkippable, match="no gap"):
        skip_gap(0, by="ann", reason="none", using=alias)
    # What comes of it later is dropped; what follows is not.
    log.add("a", 2, 3)
    log.add("a", 6)
    assert reader.later(1).handled == ["a:1", "a:4", "a:5", "a:6", "a:7"]
    assert Gap.objects.using(alias).open().count() == 0
    assert len(reader.gaps) == 2


def test_a_person_who_skips_while_it_is_filled_is_told(reading, log, way, alias):
    reader = reading(**way)
    log.add("a", 1, 3)
    reader.poll()
    log.add("a", 2)
    assert reader.partition.run_once()  # its page has come, and the stream is about to be looked at
    parked = ParkedStream.objects.using(alias).get()
    skip_gap(Gap.objects.using(alias).get().pk, by="ann", reason="gone", using=alias)
    # The reader has looked before that, and comes with the version now: it loses.
    at = reader.partition.cursors[0]
    with pytest.raises(Exception, match="moved by another process"):
        reader.partition._process_held(at, parked)
    assert reader.handled == ["a:1"]
    assert reader.start().poll().handled == ["a:1", "a:3"]
    assert reader.gaps == [("a", 2, 2, "skipped")]


def test_a_handler_that_fails_on_what_was_missing(reading, log, way, alias):
    reader = reading(on_error="park", **way)
    log.add("a", 1, 3)
    log.add("b", 1)
    reader.poll()
    reader.broken = {"a"}
    log.add("a", 2)
    reader.later(1)
    parked = ParkedStream.objects.using(alias).get()
    assert (parked.version, parked.error) == (2, "ValueError: a")
    assert reader.gaps == [("a", 2, 2, "filled")]
    reader.broken = set()
    log.add("a", 4)
    ParkedStream.objects.using(alias).update(released=True)
    assert reader.later(1).handled == ["a:1", "b:1", "a:2", "a:3", "a:4"]


def test_one_that_fails_on_what_was_missing_holds_up_the_others(reading, log, way, alias):
    reader = reading(**way)
    log.add("a", 1, 3)
    log.add("b", 1, 3)
    reader.poll()
    reader.broken = {"a"}
    log.add("a", 2)
    log.add("b", 2)
    reader.later(1)
    assert Cursor.objects.using(alias).get().error == "ValueError: a"
    assert reader.handled == ["a:1", "b:1"]


@pytest.mark.parametrize(("on_error", "error"), [("stop", ValueError), ("park", OperationalError)])
def test_a_handler_that_fails_on_what_was_missing_stops_its_partition(
    reading, log, way, alias, on_error, error
):
    """As does one whose database is away: that is no event's fault."""
    reader = reading(on_error=on_error, **way)
    reader.error = error
    log.add("a", 1, 3)
    reader.poll()
    reader.broken = {"a"}
    log.add("a", 2)
    reader.later(1)
    assert Cursor.objects.using(alias).get().error == f"{error.__name__}: a"
    assert reader.handled == ["a:1"]
    reader.broken = set()
    assert reader.later(60).handled == ["a:1", "a:2", "a:3"]
    assert reader.gaps == [("a", 2, 2, "filled")]


def test_a_failing_stream_with_a_hole_further_on(reading, log, way, alias):
    reader = reading(on_error="park", **way)
    reader.broken = {"a"}
    log.add("a", 1, 2, 4)
    log.add("b", 1)
    reader.later(60)
    assert reader.handled == ["b:1"]
    assert reader.parked == [("a", 1)]
    reader.broken = set()
    ParkedStream.objects.using(alias).update(released=True)
    assert reader.later(1).handled == ["b:1", "a:1", "a:2"]
    assert reader.gaps == [("a", 3, 3, "open")]
    log.add("a", 3)
    assert reader.later(30).handled == ["b:1", "a:1", "a:2", "a:3", "a:4"]


def test_a_released_stream_holds_only_what_is_left_of_it(reading, log, way, alias):
    reader = reading(on_error="park", batch_size=2, **way)
    reader.broken = {"a"}
    log.add("a", 1, 2, 3, 4, 5)
    reader.later(60)
    reader.broken = set()
    rows = ParkedStream.objects.using(alias)
    rows.update(released=True)
    reader.partition.run_once()
    assert reader.handled == ["a:1", "a:2"]
    last = log.events.get(version=2).pk
    assert rows.values_list("version", "position").get() == (3, last + 1)


def test_one_statement_a_page_looks_the_predecessors_up(
    reading, way, alias, published, django_assert_max_num_queries
):
    reader = reading(**way)
    streams = [f"s{n}" for n in range(200)]
    published(*streams)
    reader.poll()
    published(*streams)
    with django_assert_max_num_queries(1000, connection=connections[alias]) as queries:
        reader.partition.run_once()
    selects = [q["sql"] for q in queries.captured_queries if q["sql"].startswith("SELECT")]
    # By time, what was noted of a stream says it all.
    words = DeliveredVersion._meta.db_table if way else "beside_id"
    assert len([sql for sql in selects if words in sql]) == 1
    assert len([sql for sql in selects if "beside_id" in sql]) == (0 if way else 1)
    assert len(reader.handled) == 400


def test_a_stream_that_waits_is_found_however_many_were_released(
    reading, log, way, alias, monkeypatch
):
    monkeypatch.setattr(parking, "MAX_RELEASED", 3)
    reader = reading(on_error="park", **way)
    reader.broken = {f"p{n}" for n in range(5)}
    for stream in sorted(reader.broken):
        log.add(stream, 1)
    reader.later(60)
    log.add("x", 1, 3)
    reader.poll()
    assert len(reader.parked) == 6
    reader.broken = set()
    ParkedStream.objects.using(alias).filter(stream__startswith="p").update(released=True)
    reader.now += 1
    log.add("x", 4)
    reader.poll()
    log.add("x", 2)
    reader.start().later(60)
    found = [each for each in reader.handled if each.startswith("x")]
    assert found == ["x:1", "x:2", "x:3", "x:4"]


def test_many_parked_streams_are_not_read_for_each_page(reading, log, way, alias, monkeypatch):
    """Ten thousand of them took longer than the pages of all other streams."""
    monkeypatch.setattr(version_gaps, "MANY", 1)
    reader = reading(on_error="park", **way)
    reader.broken = {"a", "b"}
    log.add("a", 1)
    log.add("b", 1)
    reader.later(60)
    assert len(reader.parked) == 2

    def looks() -> int:
        with CaptureQueriesContext(connections[alias]) as queries:
            reader.partition.run_once()
        return sum("outbox_parked" in query["sql"] for query in queries)

    reader.now += 1
    assert [looks() for _ in range(3)] == [1, 0, 0]
    reader.broken = set()
    ParkedStream.objects.using(alias).update(released=True)
    assert looks() == 0
    reader.now += 1
    assert reader.poll().handled == ["a:1", "b:1"]
