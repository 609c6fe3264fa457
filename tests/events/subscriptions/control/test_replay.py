"""Replay: from a place in the log on, each event once; parked streams; damaged cursors."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.db import connections, transaction
from django.utils import timezone

from outbox_app.database.clock import aware, zone_of
from outbox_app.events import publish, subscriber
from outbox_app.events.exceptions import ReplayRefused, UnknownLog
from outbox_app.events.log.windows import mysql
from outbox_app.events.models import Cursor, Event, Gap, ParkedStream
from outbox_app.events.subscriptions import control
from outbox_app.events.subscriptions.skips import skip_event
from outbox_app.events.subscriptions.start_point import parse_start_point, position_of
from tests.events.log.sessions import Session
from tests.faults.tools import eventually, on

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("new_log")]


def test_from_the_beginning(alias, published, run, seen_by):
    seen = seen_by("all", partitions=3)
    published("a", "b", "a")
    run("all")
    assert len(seen) == 3
    control.replay("all", "beginning")
    assert run("all") == 3
    assert sorted(seen[3:]) == [("a", 1), ("a", 2), ("b", 1)]
    assert run("all") == 0


def test_from_now(alias, published, run, seen_by):
    seen = seen_by("all", partitions=2)
    published("a", "b")
    control.replay("all", "now", skip_ahead=True)  # before it has ever run
    assert run("all") == 0
    published("a")
    control.replay("all", "now", skip_ahead=True)
    published("a")
    run("all")
    assert seen == [("a", 3)]
    assert Cursor.objects.using(alias).count() == 2


def test_from_a_position(alias, published, run, seen_by, ids):
    seen = seen_by("all")
    published(*"abcd")
    run("all")
    seen.clear()
    control.replay("all", ids()[1])
    run("all")
    assert seen == [("c", 1), ("d", 1)]
    assert Cursor.objects.using(alias).get().position >= ids()[3]
    published("e")
    run("all")
    assert seen[2:] == [("e", 1)]


@on("postgres", "mariadb")
@pytest.mark.parametrize("place", ["now", "position"])
def test_what_is_in_flight_comes_when_it_commits(alias, published, run, seen_by, place, ids):
    """A lower position that commits after the replay is not left out."""
    seen = seen_by("all")
    published("a")
    other = connections.create_connection(alias)
    try:
        other.set_autocommit(False)
        with other.cursor() as cursor:
            cursor.execute(
                "INSERT INTO outbox_event (topic, stream, version, type, data, metadata, slice, "
                "message_id) VALUES ('', 'late', 1, 't', '{}', '{}', 1, "
                "'00000000000000000000000000000001')"
            )
        published("b")
        there = "now" if place == "now" else ids()[-1]
        control.replay("all", there, skip_ahead=True)
        assert run("all") == 0
        other.commit()
    finally:
        other.close()
    run("all")
    assert seen == [("late", 1)]


def test_from_a_time(alias, published, run, seen_by, ids):
    seen = seen_by("all")
    published(*"abcde")
    rows = Event.objects.using(alias)
    start = rows.first().recorded_at
    for minute, id in enumerate(ids()):
        rows.filter(id=id).update(recorded_at=start + timedelta(minutes=minute))
    rows.filter(id=ids()[1]).delete()  # a hole
    run("all")
    for minutes, expected in ((2, "cde"), (1.5, "cde"), (2.001, "cde"), (0.5, "cde"), (-1, "acde")):
        seen.clear()
        control.replay("all", start + timedelta(minutes=minutes))
        run("all")
        assert "".join(stream for stream, _ in seen) == expected, minutes
    seen.clear()
    control.replay("all", start + timedelta(days=1))
    assert run("all") == 0


def test_a_time_in_an_empty_log(alias, run, seen_by):
    seen_by("all")
    control.replay("all", parse_start_point("2026-01-31T12:00"))
    assert run("all") == 0


@pytest.mark.parametrize("paused", [False, True])
def test_while_it_runs(alias, published, running, seen_by, paused):
    """An idle runner notices by itself; none of its pages goes to the old place."""
    seen = seen_by("all", partitions=2, batch_size=2)
    published(*"abcdef")
    with running("all"):
        eventually(lambda: len(seen) == 6, "the first time")
        if paused:
            control.pause("all")
        control.replay("all", "beginning")
        if paused:
            control.resume("all")
        eventually(lambda: len(seen) == 12, "the second time")
        published("g")
        eventually(lambda: len(seen) == 13, "what comes after")
    assert sorted(seen[:6]) == sorted(seen[6:12])


@pytest.mark.slow
def test_again_and_again_under_load(alias, published, running, seen_by):
    """After the last reset each event comes, and each once: nothing of an old page is in it."""
    seen = seen_by("all", batch_size=3)
    streams = [f"s{i}" for i in range(60)]
    published(*streams)
    with running("all"):
        for _ in range(4):
            before = len(seen)
            eventually(lambda before=before: len(seen) > before, "it handles")
            control.replay("all", "beginning")
        control.pause("all")
        control.replay("all", "beginning")
        done = len(seen)
        control.resume("all")
        eventually(lambda: len(seen) == done + 60, "all again")
    assert seen[done:] == [(stream, 1) for stream in streams]


@pytest.mark.slow
def test_a_replay_ends_the_rest_of_a_failure(alias, published, running, ids):
    broken, seen = [True], []

    @subscriber("fails")
    def handle(events):
        if broken:
            raise ValueError("broken")
        seen.extend(event.stream for event in events)

    published("a", "b")
    cursors = Cursor.objects.using(alias)
    with running("fails") as runner:

        def rests():
            """Again and again: the runner may be about to set its own, shorter rest."""
            partitions = [p for s in runner.workers for p in s.partitions.values()]
            long = [partition for partition in partitions if partition.resting > 20]
            for partition in partitions:
                partition._rest_until = partition.clock() + 1000
            return long and len(long) == len(partitions)

        eventually(lambda: cursors.filter(failures__gt=0).exists(), "it fails")
        eventually(rests, "it rests for long")
        broken.clear()
        control.replay("fails", ids()[0], skip_ahead=True)
        eventually(lambda: seen == ["b"], "it goes on at once")
    assert cursors.get().error == ""


def park(alias, stream, version, position):
    return ParkedStream.objects.using(alias).create(
        subscription="all", partition=0, log="outbox_event", stream=stream, version=version,
        position=position, error="ValueError: no",
    )  # fmt: skip


def test_parked_streams_are_forgotten_where_all_their_events_come_again(
    alias, published, run, seen_by, ids
):
    seen = seen_by("all", on_error="park")
    published(*"abca")
    run("all")
    first, second, third, last = ids()
    park(alias, "b", 1, second)
    park(alias, "c", 1, third)
    seen.clear()
    control.replay("all", second)
    assert ParkedStream.objects.using(alias).get().stream == "b"
    published("b")
    run("all")
    # b@1 lies in front of the place: it would be lost if its stream were not parked any more.
    assert seen == [("c", 1), ("a", 2)]
    control.release("all", ["b"])
    run("all")
    assert seen[2:] == [("b", 1), ("b", 2)]
    park(alias, "a", 1, first)
    control.replay("all", "now", skip_ahead=True)
    assert ParkedStream.objects.using(alias).exists()
    control.replay("all", "beginning")
    assert not ParkedStream.objects.using(alias).exists()
    assert run("all") == 5
    assert last


def test_gaps_that_parked_streams_do_not_wait_for_any_more_are_closed(
    alias, published, run, seen_by, ids
):
    seen_by("all", on_gap="park")
    published("a", "b")
    run("all")
    gaps = Gap.objects.using(alias)
    for stream, position in zip("ab", ids(), strict=True):
        park(alias, stream, 1, position)
        key = {"subscription": "all", "log": "outbox_event", "stream": stream}
        gaps.create(**key, kind="version", first=1, last=1)
    control.replay("all", ids()[0])
    stays, closed = gaps.order_by("stream")
    assert (stays.state, stays.settled_at) == ("open", None)
    assert (closed.state, closed.reason.partition(".")[0]) == (
        "closed",
        "The subscription was replayed",
    )


def test_what_others_wait_for_stays(alias, published, run, seen_by, ids):
    """That of another subscription, and what this one waits for in another log."""
    seen_by("all")
    published("a")
    run("all")
    models = [model.objects.using(alias) for model in (ParkedStream, Gap)]
    for name, log in (("other", "outbox_event"), ("all", "other_log")):
        key = {"subscription": name, "log": log, "stream": "a"}
        models[0].create(**key, partition=0, version=1, position=ids()[0], error="")
        models[1].create(**key, kind="version", first=1, last=1)
    before = [list(rows.order_by("id").values()) for rows in models]
    park(alias, "a", 1, ids()[0])
    control.replay("all", "beginning")
    assert [list(rows.order_by("id").values()) for rows in models] == before


def test_release(alias, published, run, seen_by, ids):
    seen = seen_by("all")
    published(*"abc")
    run("all")
    seen.clear()
    for stream, position in zip("abc", ids(), strict=True):
        park(alias, stream, 1, position)
    assert control.release("all", ["a", "nobody"]) == 1
    run("all")
    assert seen == [("a", 1)]
    assert control.release("all") == 2
    run("all")
    assert sorted(seen) == [("a", 1), ("b", 1), ("c", 1)]


@pytest.mark.parametrize("state", ["", "nonsense", '{"window":"other"}', "\U0001f600"])
def test_a_damaged_cursor_is_repaired(alias, published, run, seen_by, state):
    seen = seen_by("all", partitions=2)
    published(*"abcd")
    run("all")
    cursors = Cursor.objects.using(alias)
    cursors.filter(partition=0).update(state=state)
    run("all")
    cursors.filter(partition=1).delete()
    assert "cannot be read" in cursors.get(partition=0).error
    seen.clear()
    control.replay("all", "beginning")
    run("all")
    assert sorted(seen) == [(stream, 1) for stream in "abcd"]
    assert set(cursors.values_list("error", "failures")) == {("", 0)}


def test_one_log_of_several(alias, published, run, seen_by):
    seen_by("all")
    with pytest.raises(UnknownLog):
        control.replay("all", "now", log="nowhere")


NOWHERE = [-1, 10**12, True, 2**63]


def test_positions_that_the_log_does_not_have(alias, published, run, seen_by):
    seen_by("all")
    published("a")
    run("all")
    before = Cursor.objects.using(alias).values().get()
    for place in NOWHERE:
        with pytest.raises(ReplayRefused, match="no event at or after position"):
            control.replay("all", place)
    assert Cursor.objects.using(alias).values().get() == before


@pytest.mark.parametrize("text", ["", "tomorrow", "-1", "1.5", "2026-13-01T00:00", "9" * 30, "٣"])
def test_texts_that_are_no_place(text):
    with pytest.raises(ReplayRefused, match="is no place in a log"):
        parse_start_point(text)


def test_effects_and_place_are_one_after_a_rollback(alias, published, run, seen_by, ids):
    """A replay that fails half-way has moved nothing."""
    seen = seen_by("all", partitions=2)
    published(*"ab")
    run("all")
    before = list(Cursor.objects.using(alias).order_by("pk").values())
    park(alias, "a", 1, ids()[0])
    with transaction.atomic(using=alias):
        control.replay("all", "beginning")
        transaction.set_rollback(True, using=alias)
    assert list(Cursor.objects.using(alias).order_by("pk").values()) == before
    assert ParkedStream.objects.using(alias).exists()
    assert len(seen) == 2


def test_repartition(alias, published, run, seen_by):
    seen = seen_by("all", partitions=2)
    published(*"abcdefgh")
    run("all")
    again = seen_by("all", partitions=3)
    assert run("all") == 0  # refused: 3 is no multiple of 2
    assert control.repartition("all") == (2, 3)
    assert run("all") == 0
    published(*"abcdefgh")
    assert run("all") == 8
    assert sorted(again) == [(stream, 2) for stream in "abcdefgh"]
    assert len(seen) == 8


def test_publishing_goes_on_during_a_replay(alias, published, run, seen_by):
    seen_by("all")
    published("a")
    with transaction.atomic(using=alias):
        publish("b", "made")
    control.replay("all", "beginning")
    assert run("all") == 2


@on("postgres", "mariadb")
@pytest.mark.parametrize("how", ["replay", "repartition"])
def test_what_a_cursor_waits_for_comes_though_it_lies_far_below(
    alias, published, run, seen_by, how, monkeypatch
):
    monkeypatch.setattr(mysql, "LOOK_BACK", 0)
    seen = seen_by("all", partitions=2)
    with Session(alias) as late:
        late.begin().publish("late")
        published("b")
        run("all")
        if how == "replay":
            control.replay("all", "now")
        else:
            seen = seen_by("all", partitions=3)
            assert control.repartition("all") == (2, 3)
        late.commit()
    run("all")
    assert seen[-1] == ("late", 1)


def test_what_was_skipped_is_not_handled_by_a_new_partition(alias, published, run, ids):
    seen, broken = [], [True]

    def declare(**options):
        @subscriber("all", **options)
        def handle(events):
            if broken:
                raise ValueError
            seen.extend((event.stream, event.version) for event in events)

    declare()
    published("bad")
    run("all")
    run("all")
    skip_event("all", ids()[0], by="ann", reason="bad", using=alias)
    broken.clear()
    declare(partitions=4)
    published("a")
    run("all")
    run("all")
    assert seen == [("a", 1)]


def test_times_of_a_project_without_time_zones(alias, published, settings):
    published("a")
    settings.USE_TZ, settings.TIME_ZONE = False, "Asia/Kolkata"
    connections[alias].close()
    event = Event.objects.using(alias).get()
    recorded, minute = aware(event.recorded_at, using=alias), timedelta(minutes=1)
    with timezone.override("Pacific/Auckland"):  # of the visitor
        for place in (recorded - minute, datetime(2020, 1, 1)):
            assert position_of(Event, place, using=alias) == event.pk - 1
        assert position_of(Event, recorded + minute, using=alias) != event.pk - 1
    connections[alias].close()


def test_a_time_in_the_hour_that_comes_twice(alias, published, settings, ids):
    """Where the clocks go back, times without a zone do not grow with the positions."""
    published(*"abcdefg")
    minutes = (-1, 40, 59, 65, 89, 95, 121)  # from the first 2 o'clock on
    times = [datetime(2026, 10, 25, tzinfo=UTC) + timedelta(minutes=n) for n in minutes]
    settings.USE_TZ, settings.TIME_ZONE = False, "Europe/Berlin"
    connections[alias].close()
    for id, time in zip(ids(), times, strict=True):
        local = str(time if alias == "postgres" else timezone.make_naive(time, zone_of(alias)))
        with connections[alias].cursor() as cursor:
            cursor.execute("UPDATE outbox_event SET recorded_at = %s WHERE id = %s", [local, id])
    for minute, first in ((30, 1), (50, 2)):
        place = datetime(2026, 10, 25, 2, minute)
        assert position_of(Event, place, using=alias) < ids()[first]
    assert position_of(Event, datetime(2026, 10, 25, 3, 1), using=alias) == ids()[5]
    connections[alias].close()


def test_a_time_without_a_zone_is_in_that_of_the_visitor(alias, published):
    published("a")
    event = Event.objects.using(alias).get()
    with timezone.override("Pacific/Auckland"):
        for minutes, is_passed in ((-1, False), (1, True)):
            place = timezone.make_naive(event.recorded_at + timedelta(minutes=minutes))
            assert (position_of(Event, place, using=alias) != event.pk - 1) is is_passed


@pytest.mark.parametrize("place", [datetime.min, datetime.min.replace(tzinfo=UTC)])
def test_times_that_no_log_can_have(alias, published, settings, place):
    settings.TIME_ZONE = "Asia/Tokyo"
    published("a")
    with pytest.raises(ReplayRefused, match="too early, or too late"):
        position_of(Event, place, using=alias)
