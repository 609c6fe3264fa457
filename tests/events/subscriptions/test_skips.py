"""A decision to skip an event holds until the cursor has passed it, in any order of steps."""

from __future__ import annotations

from io import StringIO

import pytest
from django.core.management import call_command
from django.db import OperationalError

from outbox_app.events import subscriber
from outbox_app.events.exceptions import GapNotSkippable
from outbox_app.events.log.newevent import slice_of
from outbox_app.events.models import Cursor, Event, Gap, ParkedStream, Subscription
from outbox_app.events.subscriptions import control
from outbox_app.events.subscriptions import subscriber as module
from outbox_app.events.subscriptions.counting import count_events
from outbox_app.events.subscriptions.parking import Parking
from outbox_app.events.subscriptions.skips import discard_stream, skip_event, skip_gap
from outbox_app.events.subscriptions.version_gaps import give_up
from outbox_app.failpoints import set_failpoint
from outbox_app.models import InboxEntry
from tests.events.log.sessions import Session

pytestmark = pytest.mark.django_db(transaction=True)

#: For readers by time: what was written before, and since.
BEFORE, SINCE = "2026-01-01T00:00Z", "2026-01-02T00:00Z"


@pytest.fixture
def shop(alias):
    """``shop(poison, **options)``: it writes a row per event, and fails at these streams."""

    def make(*poison, **options):
        poison = set(poison)
        module._subscribers.pop("shop", None)

        @subscriber("shop", **options)
        def handle(events):
            for event in events:
                InboxEntry.objects.using(alias).create(job_id=f"{event.stream}@{event.version}")
            if bad := [event.stream for event in events if event.stream in poison]:
                raise ValueError(bad[0])

        return poison

    return make


@pytest.fixture
def skip(alias):
    """``skip("s1")``: decide to skip the first event of a stream."""

    def make(stream):
        place = Event.objects.using(alias).get(stream=stream, version=1).pk
        return skip_event("shop", place, by="ann", reason="why", using=alias)

    return make


def effects(alias):
    return sorted(InboxEntry.objects.using(alias).values_list("job_id", flat=True))


def test_a_skip_outlasts_a_stream_that_is_released(alias, published, run, shop, skip):
    """The stream is handled first, and moves the cursor."""
    shop("s1")
    parked = {"subscription": "shop", "partition": 0, "log": "outbox_event", "error": "no"}
    ParkedStream.objects.using(alias).create(**parked, stream="s0", version=1, position=1)
    published("s0", "s1", "s2")
    run("shop")
    run("shop")
    skip("s1")
    ParkedStream.objects.using(alias).update(released=True)
    assert run("shop") == 2
    assert effects(alias) == ["s0@1", "s2@1"]
    assert Cursor.objects.using(alias).get().failed_event is None


@pytest.mark.parametrize("alias", ["postgres", "mariadb"])
@pytest.mark.parametrize("then", ["is handled", "fails", "is skipped"])
def test_a_skip_outlasts_an_event_that_commits_late(
    alias, published, run, shop, skip, settings, then
):
    settings.OUTBOX = {**settings.OUTBOX, "DATABASE": alias}
    poison = shop("bad") if then == "is handled" else shop("bad", "late")
    published("first")
    run("shop")
    with Session(alias) as late:
        late.begin()
        late.publish("late")
        published("bad", "next")
        run("shop")
        run("shop")
        skip("bad")
        late.commit()
    count_events("shop", restart=True, using=alias)
    run("shop")
    cursor = Cursor.objects.using(alias).get()
    if then != "is handled":
        assert cursor.failed_event["stream"] == "late"
        out = StringIO()
        call_command("outbox_subscriptions", "list", "--json", stdout=out)
        assert "late" in out.getvalue()
        assert "bad" not in out.getvalue()
        count_events("shop", restart=True, using=alias)
        if then == "is skipped":
            skip("late")
        poison.clear()
        run("shop")
    cursor.refresh_from_db()
    assert (cursor.failures, cursor.failed_event) == (0, None)
    wanted = ["first@1", "next@1"] if then == "is skipped" else ["first@1", "late@1", "next@1"]
    assert effects(alias) == wanted
    [count] = count_events("shop", using=alias)
    assert (count.published, count.difference) == (3, 0)


def test_a_skip_outlasts_a_page_that_cannot_be_stored(alias, published, run, shop, skip):
    poison = shop("s0")
    published("s0", "s1")
    run("shop")
    run("shop")
    skip("s0")

    def fail():
        set_failpoint("advanced", None)
        raise OperationalError("deadlock")

    set_failpoint("advanced", fail)
    run("shop")
    poison.clear()
    run("shop")
    assert effects(alias) == ["s1@1"]


def test_skips_of_partitions_that_become_one(alias, published, run, shop, skip):
    """Only a reader by time may be behind in both, so that both skips are to come."""
    bad = [next(f"s{n}" for n in range(99) if slice_of(f"s{n}") % 2 == part) for part in (0, 1)]
    by_time = {"by_time": True, "on_gap": "park"}
    shop(*bad, partitions=2, **by_time)
    published(*bad, "good")
    Event.objects.using(alias).update(recorded_at=BEFORE)
    for _ in range(3):
        run("shop")
    for stream in bad:
        skip(stream)
    shop(partitions=1, **by_time)
    assert control.repartition("shop", using=alias) == (2, 1)
    run("shop")
    assert effects(alias) == ["good@1"]


def test_what_was_skipped_of_a_parked_stream_does_not_come_again(alias, published, run, shop, skip):
    """A reader by time asks what was handled before the next event of the stream."""
    poison = shop("s1", on_error="park", on_gap="park", by_time=True)
    published("s0", "s1")
    Event.objects.using(alias).update(recorded_at=BEFORE)
    for _ in range(3):
        run("shop")
    skip("s1")
    run("shop")
    assert not ParkedStream.objects.using(alias).exists()
    poison.clear()
    published("s1")
    Event.objects.using(alias).filter(version=2).update(recorded_at=SINCE)
    run("shop")
    assert effects(alias) == ["s0@1", "s1@2"]


def test_the_event_at_which_a_released_stream_fails_again_can_be_skipped(alias, published, run):
    """Between it and the one that was handled last there are events of other streams."""
    bad, seen = {("s1", 1), ("s1", 2)}, []

    @subscriber("shop", on_error="park")
    def handle(events):
        seen.extend((event.stream, event.version) for event in events)
        if not bad.isdisjoint(seen[-len(events) :]):
            raise ValueError

    published("s1", "s2", "s1")
    for _ in range(3):
        run("shop")
    bad.discard(("s1", 1))
    control.release("shop", using=alias)
    run("shop")
    assert ParkedStream.objects.using(alias).get().failed_event["version"] == 2
    place = Event.objects.using(alias).get(stream="s1", version=2).pk
    skip_event("shop", place, by="ann", reason="why", using=alias)
    run("shop")
    assert not ParkedStream.objects.using(alias).exists()


def test_a_skip_outlasts_the_attempt_that_fails_meanwhile(
    alias, published, run, shop, skip, monkeypatch
):
    """A person skips the event while its released stream is tried, and waits for that."""
    shop("s1", on_error="park")
    published("s0", "s1")
    for _ in range(3):
        run("shop")
    repark = Parking.repark

    def skip_first(self, *args):
        skip("s1")
        repark(self, *args)

    monkeypatch.setattr(Parking, "repark", skip_first)
    control.release("shop", using=alias)
    run("shop")
    assert not ParkedStream.objects.using(alias).exists()
    assert effects(alias) == ["s0@1"]


@pytest.mark.parametrize("moved", [{"last": 3}, {"first": 3}])
def test_a_gap_that_is_another_one_by_now_is_not_given_up(alias, moved):
    where = {"subscription": "shop", "log": "outbox_event", "stream": "s"}
    gap = Gap.objects.using(alias).create(kind="version", first=2, last=4, **where)
    ParkedStream.objects.using(alias).create(**where, partition=0, version=3, position=1, error="")
    Gap.objects.using(alias).update(**moved)
    assert not give_up(gap, by="ann", reason="why", using=alias)
    assert Gap.objects.using(alias).get().state == Gap.State.OPEN


def test_a_gap_that_is_filled_releases_nothing(alias):
    """Its versions are there, and the handler has refused them: the stream waits for a person."""
    where = {"subscription": "shop", "log": "outbox_event", "stream": "s"}
    gap = Gap.objects.using(alias).create(
        kind="version", first=2, last=4, state=Gap.State.FILLED, **where
    )
    ParkedStream.objects.using(alias).create(**where, partition=0, version=2, position=1, error="")
    with pytest.raises(GapNotSkippable, match="is filled"):
        skip_gap(gap.pk, by="ann", reason="why", using=alias)
    parked = ParkedStream.objects.using(alias).get()
    assert (parked.version, parked.released) == (2, False)


def test_a_skip_of_a_parked_stream_is_in_the_log_that_was_named(alias):
    Subscription.objects.using(alias).create(name="shop", partitions=1)
    failed = {"position": 7, "stream": "s"}
    where = {"stream": "s", "partition": 0, "version": 2, "position": 7, "failed_event": failed}
    parked = ParkedStream.objects.using(alias)
    for name, log in (("other", "outbox_event"), ("shop", "ledger"), ("shop", "outbox_event")):
        parked.create(**where, subscription=name, log=log, error="")
    who = {"by": "ann", "reason": "why", "using": alias, "log": "outbox_event"}
    assert skip_event("shop", 7, **who).log == "outbox_event"
    columns = ("subscription", "log", "version", "position", "released", "failed_event")
    assert list(parked.order_by("pk").values_list(*columns)) == [
        ("other", "outbox_event", 2, 7, False, failed),
        ("shop", "ledger", 2, 7, False, failed),
        ("shop", "outbox_event", 3, 8, True, None),
    ]
    with pytest.raises(GapNotSkippable, match="reads outbox_event"):
        discard_stream("shop", "s", **who)
