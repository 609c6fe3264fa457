"""A move that skips events is refused, or recorded; every other move is neither."""

from __future__ import annotations

import pytest
from django.db import connections

from outbox_app.events.exceptions import ReplayRefused
from outbox_app.events.log.newevent import slice_of
from outbox_app.events.models import Cursor, Event, Gap, ParkedStream
from outbox_app.events.subscriptions import control
from outbox_app.events.subscriptions import subscriber as declared
from outbox_app.events.subscriptions.start_point import position_of
from outbox_app.models import counting
from tests.events.log.sessions import Session
from tests.faults.tools import on

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("new_log")]


@pytest.mark.parametrize("place", ["now", "position", "time"])
@pytest.mark.parametrize("partitions", [1, 3])
def test_it_is_refused(alias, published, run, seen_by, place, partitions, cursors):
    seen, _ = seen_by("all", partitions=partitions), seen_by("other")
    published(*"ab")
    run("all")
    published(*"cdefg")
    run("other")
    before = cursors()
    event = Event.objects.using(alias).order_by("id")[6]
    there = {"now": "now", "position": event.pk, "time": event.recorded_at}[place]
    if place == "time":
        rows = Event.objects.using(alias).filter(pk__gte=event.pk)
        there = event.recorded_at.replace(year=event.recorded_at.year + 1)
        rows.update(recorded_at=there)
        there = there.replace(year=there.year + 1)
    with pytest.raises(
        ReplayRefused, match=r"5 events .* \(\d+ made c, \d+ made d, \d+ made e, …\)"
    ):
        control.replay("all", there)
    assert cursors() == before
    assert not Gap.objects.using(alias).exists()
    [move] = control.plan("all", there)
    assert move.passes.startswith("5 events")
    assert run("all") == 5
    assert len(seen) == 7


def test_it_is_done_and_recorded(alias, published, run, seen_by, ids):
    seen = seen_by("all")
    published(*"abcd")
    places = ids()
    for _ in range(2):
        control.replay("all", "beginning")
        control.replay("all", places[2], skip_ahead=True, by="Ada", reason="imported")
    assert run("all") == 1
    assert seen == [("d", 1)]
    gap = Gap.objects.using(alias).get()
    assert (gap.kind, gap.state, gap.subscription) == ("event", "skipped", "all")
    assert (gap.first, gap.last, gap.settled_by) == (places[0], places[2], "Ada")
    assert gap.reason.startswith("Moved ahead over 3 events")
    assert gap.reason.count("imported") == 2  # both decisions


def test_of_more_than_are_counted_the_first_are_named(alias, published, seen_by, ids, monkeypatch):
    monkeypatch.setattr(counting, "MANY", 1)
    seen_by("all")
    published(*"abcd")
    first, *_ = ids()
    Event.objects.using(alias).filter(pk=first).update(topic="lies behind the others now")
    control.replay("all", "now", skip_ahead=True, by="Ada", reason="old")
    assert Gap.objects.using(alias).get().first == first


def test_what_it_does_not_want_is_not_passed_over(alias, published, run, seen_by):
    seen_by("some", types=["order.*"])
    published(*"ab")
    control.replay("some", "now")
    published("c", type="order.placed")
    with pytest.raises(ReplayRefused, match="1 event that"):
        control.replay("some", "now")


@on("postgres", "mariadb")
def test_a_version_after_a_gap_is_not_passed_over(alias, published, run, seen_by):
    """Its subscription would drop the one that fills it. Only rows by hand commit in that order."""
    seen = seen_by("some", types=["order.*"], on_gap="park", partitions=2)
    published("a", type="order.placed")
    run("some")
    events, row = Event.objects.using(alias), {"stream": "a", "slice": slice_of("a")}
    with Session(alias).begin() as late:
        late.do(lambda: events.create(version=2, type="order.paid", **row))
        events.create(version=3, type="looked at", **row)
        with pytest.raises(ReplayRefused, match=r"1 event that .* \(\d+ looked at a\)"):
            control.replay("some", "now")
        run("some")
        control.replay("some", "now")
        late.commit()
    run("some")
    assert seen == [("a", 1), ("a", 2)]


def test_a_start_is_no_move_ahead(alias, published, run, seen_by):
    """Where it would begin with what is to come, nothing that lies before is missed."""
    seen_by("new", start="now")
    seen_by("old")
    published(*"ab")
    control.replay("new", "now")
    with pytest.raises(ReplayRefused, match="2 events"):
        control.replay("old", "now")


@pytest.fixture
def with_a_parked(alias, published, run, seen_by, ids):
    """The events that a subscription has seen since it parked the stream ``a``."""
    seen = seen_by("all")
    published("a")
    run("all")
    seen.clear()
    ParkedStream.objects.using(alias).create(
        subscription="all", partition=0, log="outbox_event", stream="a", version=1,
        position=ids()[0], error="",
    )  # fmt: skip
    return seen


def test_parked_streams_are_not_passed_over(with_a_parked, published, run):
    published("a")
    control.replay("all", "now")
    control.release("all")
    run("all")
    assert with_a_parked == [("a", 1), ("a", 2)]


def test_it_is_refused_behind_many_events_of_a_parked_stream(
    with_a_parked, published, run, monkeypatch
):
    monkeypatch.setattr(counting, "MANY", 1)
    published(*"aaaab")
    with pytest.raises(ReplayRefused, match="1 event that"):
        control.replay("all", "now")
    run("all")
    assert with_a_parked == [("b", 1)]


@on("postgres", "mariadb")
def test_what_is_in_flight_is_not_passed_over(alias, published, run, seen_by):
    seen = seen_by("all")
    published("a")
    run("all")
    other = connections.create_connection(alias)
    try:
        other.set_autocommit(False)
        with other.cursor() as cursor:
            cursor.execute(
                "INSERT INTO outbox_event (topic, stream, version, type, data, metadata, slice, "
                "message_id) VALUES ('', 'late', 1, 't', '{}', '{}', 1, "
                "'00000000000000000000000000000001')"
            )
        control.replay("all", "now")
        other.commit()
    finally:
        other.close()
    run("all")
    assert seen[-1] == ("late", 1)


def test_one_that_is_damaged_or_no_longer_declared(alias, published, run, seen_by):
    seen_by("all")
    published("a")
    run("all")
    published("b")
    Cursor.objects.using(alias).update(state="nonsense")
    declared._subscribers.pop("all")
    with pytest.raises(ReplayRefused, match="1 event that"):
        control.replay("all", "now")


def test_the_command(alias, published, run, seen_by, monkeypatch, command):
    seen_by("shop")
    published(*"abc")
    replay = ("replay", "shop", "--from", "now")
    code, out = command(*replay)
    assert (code, "--skip-ahead" in out) == (1, True)
    code, out = command(*replay, "--skip-ahead", "--dry-run")
    assert (code, "passes over 3 events" in out) == (0, True)
    for answer, done in (("", 1), ("n", 1), ("y", 0)):
        monkeypatch.setattr("builtins.input", lambda question, answer=answer: answer)
        code, out = command(*replay, "--skip-ahead", "--reason", "old")
        assert code == done
        assert Gap.objects.using(alias).exists() == (not done)
    gap = Gap.objects.using(alias).get()
    assert "manage.py outbox_subscriptions" in gap.settled_by
    assert gap.reason.endswith("old")
    published("d")

    def closed(question):
        raise EOFError

    monkeypatch.setattr("builtins.input", closed)
    assert command(*replay, "--skip-ahead")[0] == 1
    assert command(*replay, "--skip-ahead", "--noinput")[0] == 0
    published("e")
    assert command(*replay, "--skip-ahead", "--no-input")[0] == 0


def test_the_ends_of_a_log_are_places(alias, published, ids):
    published("a", "b")
    last = ids()[-1]
    assert [position_of(Event, place, using=alias) for place in (0, last)] == [0, last]
    for place in (-1, last + 1, True):
        with pytest.raises(ReplayRefused, match=f"its last position is {last}"):
            position_of(Event, place, using=alias)
