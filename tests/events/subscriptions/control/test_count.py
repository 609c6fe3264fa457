"""The count of a log's events against a subscription's: none is missed or counted twice."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta

import pytest
from django.db import connections, transaction

from outbox_app.events import NewEvent, prune_events, publish_many, subscriber
from outbox_app.events.exceptions import ReplayRefused
from outbox_app.events.log.reader import LogReader
from outbox_app.events.models import Cursor, Event, Gap, ParkedStream, Subscription
from outbox_app.events.subscriptions import control
from outbox_app.events.subscriptions import subscriber as declared
from outbox_app.events.subscriptions.counting import count_events
from outbox_app.events.subscriptions.skips import discard_stream, skip_event, skip_gap
from tests.faults.tools import on

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("new_log")]


@pytest.fixture
def shop(alias):
    """``shop(poison, **options)``: a handler that fails at these streams; returns the set."""

    def make(*poison, **options):
        poison = set(poison)

        @subscriber("shop", **options)
        def handle(events):
            if any(event.stream in poison for event in events):
                raise ValueError

        return poison

    return make


@pytest.fixture
def figures(alias):
    """``figures()``: published, handled, parked, skipped and difference since counting began."""

    def make():
        [found] = count_events("shop", using=alias)
        assert found.since
        assert bool(found.uneven) == bool(found.difference)
        return found.published, found.handled, found.parked, found.skipped, found.difference

    return make


def begin(alias):
    [found] = count_events("shop", restart=True, using=alias)
    return found


def lose(alias):
    """Move the cursors past what is there, as no code does."""
    for cursor in Cursor.objects.using(alias):
        state = LogReader(Event, using=alias).window.start(None).dump()
        Cursor.objects.using(alias).filter(pk=cursor.pk).update(state=state)


def test_it_says_since_when_with_the_zone(alias, published, run, shop, settings):
    """Without ``USE_TZ`` a database's time has none."""
    settings.USE_TZ, settings.TIME_ZONE = False, "Asia/Tokyo"
    shop()
    published("a")
    run("shop")
    begin(alias)
    since = datetime.fromisoformat(begin(alias).since)
    assert abs(since - datetime.now(UTC)) < timedelta(minutes=30)


@pytest.mark.parametrize("partitions", [1, 3])
@pytest.mark.parametrize("options", [{}, {"types": ["m*"]}, {"types": ["m*"], "on_gap": "park"}])
def test_it_is_exact_after_pages(alias, published, run, shop, figures, partitions, options):
    shop(partitions=partitions, **options)
    with pytest.raises(ReplayRefused, match="never run"):
        count_events("shop", using=alias)
    assert not Subscription.objects.using(alias).exists()  # nothing was written
    published(*"abc")
    run("shop", batch_size=2)
    published("a")  # behind the cursors when counting begins
    assert not begin(alias).since
    published(*"abcd")
    with transaction.atomic(using=alias):
        publish_many([NewEvent("a", "made")] * 3)
        transaction.set_rollback(True, using=alias)
    published(*"ef", type="other")
    assert figures() == (0, 0, 0, 0, 0)
    run("shop", batch_size=2)
    total = 5 if options else 7
    assert figures() == (total, total, 0, 0, 0)
    assert begin(alias).handled == total  # the last count up to here, the next one from here
    assert figures() == (0, 0, 0, 0, 0)


@on("postgres", "mariadb")
def test_what_commits_late_is_counted_once(alias, published, run, shop, figures):
    shop()
    published("a")
    run("shop")
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
        run("shop")
        begin(alias)
        published("c")
        run("shop")
        other.commit()
    finally:
        other.close()
    assert figures() == (1, 1, 0, 0, 0)
    run("shop")
    assert figures() == (2, 2, 0, 0, 0)


@pytest.mark.parametrize("before", [False, True], ids=["parked later", "parked before"])
def test_a_parked_stream(alias, published, run, shop, figures, before):
    """Its events count once, when they are handled; whenever the count began."""
    poison = shop("b", on_error="park")
    published("a")
    run("shop")
    if not before:
        begin(alias)
    published("b", "c", "b")
    for _ in range(3):
        Cursor.objects.using(alias).update(retry_at=None)
        run("shop")
    assert ParkedStream.objects.using(alias).get().stream == "b"
    assert Cursor.objects.using(alias).get().handled == 2
    if before:
        begin(alias)
    base = (0, 0) if before else (3, 1)
    already = 0 if before else 2
    assert figures() == (*base, already, 0, 0)
    published("b", "a")
    run("shop")
    assert figures() == (base[0] + 2, base[1] + 1, already + 1, 0, 0)
    poison.clear()
    if before:
        control.release("shop")
        run("shop")
        assert figures() == (2, 4, -2, 0, 0)
        assert Cursor.objects.using(alias).get().handled == 6
    else:
        skip_event(
            "shop", ParkedStream.objects.using(alias).get().position, by="a", reason="b",
            using=alias,
        )  # fmt: skip
        run("shop")
        assert figures() == (5, 4, 0, 1, 0)


def test_a_discarded_stream(alias, published, run, shop, figures):
    shop("b", on_error="park")
    published("b", "b")
    for _ in range(3):
        run("shop")
    begin(alias)
    published("b", "a")
    run("shop")
    discard_stream("shop", "b", by="a", reason="b", using=alias)
    assert figures() == (2, 1, -2, 3, 0)


@pytest.mark.parametrize("before", [False, True], ids=["later", "before"])
def test_a_skipped_event(alias, published, run, shop, figures, before):
    shop("b")
    published("a")
    run("shop")
    if not before:
        begin(alias)
    published("b", "c")
    run("shop")
    run("shop")
    failed = Cursor.objects.using(alias).get().failed_event
    skip_event("shop", failed["position"], by="a", reason="b", using=alias)
    if before:
        begin(alias)
    assert figures() == (0, 0, 0, 0, 0)
    run("shop")
    assert figures() == (2, 1, 0, 1, 0)


def test_versions_that_are_missing(alias, published, run, shop, figures):
    """What waits for them is parked; what comes after they were given up is skipped."""
    shop(on_gap="park", max_backtracks=1)
    published("a")
    run("shop")
    begin(alias)
    published("a", "a", "b")
    events = Event.objects.using(alias).filter(stream="a")
    missing = events.get(version=2)
    events.filter(version=2).delete()
    run("shop")
    assert figures() == (2, 1, 1, 0, 0)
    gap = Gap.objects.using(alias).get(kind="version")
    skip_gap(gap.pk, by="a", reason="b", using=alias)
    run("shop")
    assert figures() == (2, 2, 0, 0, 0)
    missing.pk = None
    missing.save(using=alias, force_insert=True)
    run("shop")
    assert figures() == (3, 2, 0, 1, 0)


def test_what_moves_it_drops_the_count(alias, published, run, shop):
    shop()
    published("a")
    run("shop")
    begin(alias)
    control.replay("shop", "beginning")
    assert Cursor.objects.using(alias).filter(counted__isnull=True).exists()
    run("shop")
    [found] = count_events("shop", using=alias)
    assert not found.since
    published("a")
    run("shop")
    [found] = count_events("shop", using=alias)
    assert (found.published, found.handled, found.difference) == (1, 1, 0)


def test_a_prune_drops_only_counts_of_what_goes(alias, published, run, shop, figures):
    shop()
    published("a")
    run("shop")
    begin(alias)
    published("b", "b")
    run("shop")
    rows = Event.objects.using(alias)
    rows.filter(stream="a").update(recorded_at="2020-01-01T00:00Z")
    assert prune_events(using=alias, log="outbox_event", older_than=1) == 1
    assert figures() == (2, 2, 0, 0, 0)
    rows.update(recorded_at="2020-01-01T00:00Z")
    assert prune_events(using=alias, log="outbox_event", older_than=1) == 2
    assert Cursor.objects.using(alias).get().counted is None


def test_a_prune_of_what_was_discarded_is_no_loss(alias, published, run, shop):
    """It was counted as parked when counting began, and as skipped since."""
    shop("b", on_error="park")
    published("b", "a")
    for _ in range(3):
        Cursor.objects.using(alias).update(retry_at=None)
        run("shop")
    begin(alias)
    discard_stream("shop", "b", by="a", reason="b", using=alias)
    Event.objects.using(alias).update(recorded_at="2020-01-01T00:00Z")
    assert prune_events(using=alias, log="outbox_event", older_than=1) == 2
    [found] = count_events("shop", using=alias)
    assert (found.since, found.difference) == ("", 0)


def test_a_prune_keeps_a_count_that_began_after_the_decision(alias, published, run, shop, figures):
    """Neither the note nor the rows since then have the events that were discarded before."""
    poison = shop("b", on_error="park")
    published("b", "a")
    for _ in range(3):
        Cursor.objects.using(alias).update(retry_at=None)
        run("shop")
    discard_stream("shop", "b", by="a", reason="b", using=alias)
    begin(alias)
    Event.objects.using(alias).update(recorded_at="2020-01-01T00:00Z")
    assert prune_events(using=alias, log="outbox_event", older_than=1) == 2
    poison.clear()
    published("b")
    run("shop")
    assert figures() == (1, 1, 0, 0, 0)


def test_other_types_are_another_count(alias, published, run, shop):
    shop(types=["made"])
    published("a")
    run("shop")
    begin(alias)
    declared._subscribers.pop("shop")
    Subscription.objects.using(alias).update(reads={"topics": None, "types": ["other"]})
    [found] = count_events("shop", using=alias)
    assert not found.since


@pytest.mark.parametrize("partitions", [1, 2])
def test_a_lost_event_is_found(alias, published, run, shop, partitions, command):
    shop(partitions=partitions)
    published("a")
    run("shop")
    assert command("count", "shop") == (0, "outbox_event: counting from now on\n")
    published("b")
    run("shop")
    code, out = command("count", "shop")
    assert (code, "published 1, handled 1, parked 0, skipped 0, difference 0" in out) == (0, True)
    published("c")
    lose(alias)
    published("d")
    run("shop")
    code, out = command("count", "shop")
    assert code == 1
    assert "published 3, handled 2, parked 0, skipped 0, difference 1" in out
    assert ": 1\n" in out.split("partition ")[1]
    code, out = command("count", "shop", "--json", "--restart")
    [found] = json.loads(out)
    assert (code, found["difference"], len(found["uneven"])) == (1, 1, 1)
    assert command("count", "shop")[0] == 0
    assert command("count", "other")[0] == 2
    assert "arguments are required: NAME" in command("count")[1]
