"""A run that ends stores where it stands, even if none of the events were for its subscription."""

from __future__ import annotations

import threading
from io import StringIO
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections

from outbox_app.events import prune_events, subscriber
from outbox_app.events.models import Cursor, Event
from outbox_app.events.subscriptions.partition import STORE_SECONDS, Partition
from outbox_app.events.subscriptions.subscriber import subscriber_named
from tests.patience import patience

pytestmark = pytest.mark.django_db(transaction=True)

STREAMS = [f"s{number}" for number in range(10)]


@pytest.fixture
def publish_old(alias: str, published: Any) -> Any:
    """``publish_old()``: commit ten events of another type, old enough to be pruned."""

    def make() -> None:
        published(*STREAMS, type="view")
        Event.objects.using(alias).update(recorded_at="2026-01-01T00:00Z")

    return make


def unpruned(alias: str) -> int:
    """Prune the log; return how many events a subscription held."""
    prune_events(using=alias, older_than=1)
    return Event.objects.using(alias).count()


OPTIONS = [
    {},
    {"partitions": 4},
    {"on_gap": "park"},
    {"on_gap": "park", "by_time": True, "partitions": 16},
    {"on_error": "park"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=["plain", "parts", "gaps", "by_time", "park"])
@pytest.mark.parametrize("command", ["run_subscriptions", "run_outbox"])
def test_runs_with_once(alias, publish_old, monkeypatch, command, options):
    seen: list[str] = []

    @subscriber("rare", types=["invoice"], **options)
    def handle(events):
        seen.extend(event.stream for event in events)

    for _ in range(2):
        publish_old()
        call_command(command, once=True, database=alias, stdout=StringIO())
        assert unpruned(alias) == 0
    assert seen == []


@pytest.mark.parametrize("partitions", [1, 4])
def test_a_run_that_is_stopped(alias, publish_old, running, partitions):
    """A deployment, or a process manager, may stop each run before its position is due."""
    subscriber("rare", types=["invoice"], partitions=partitions)(list.clear)
    publish_old()
    turned = threading.Event()

    def on_turn(runner):
        if any(each.cursors for each in runner.workers[0].partitions.values()):
            turned.set()

    with running("rare", on_turn=on_turn):
        assert turned.wait(patience())
    assert unpruned(alias) == 0


def test_the_rare_event_is_handled_though_others_were_passed(alias, publish_old, published, run):
    seen: list[Any] = []
    subscriber("rare", types=["invoice"])(seen.extend)
    for _ in range(2):
        publish_old()
        run("rare")
        published("a", type="invoice")
        run("rare")
    assert [event.version for event in seen] == [1, 2]


def test_a_cursor_that_was_moved_meanwhile_stays(alias, publish_old, run):
    """A replay came after the last page: the run ends, and does not undo it."""
    subscriber("rare", types=["invoice"])(list.clear)
    run("rare")
    publish_old()
    partition = Partition(subscriber_named("rare"), 0)
    partition.run_once()
    cursors = Cursor.objects.using(alias)
    cursors.bump_revision()
    before = cursors.values().get()
    partition.store()
    assert cursors.values().get() == before


def test_a_place_that_events_have_passed_is_not_stored(alias, publish_old, published, run):
    """The run ends right after a page with an event: to go back would handle it again."""
    seen: list[Any] = []
    subscriber("rare", types=["invoice"])(seen.extend)
    run("rare")
    partition = Partition(subscriber_named("rare"), 0)
    publish_old()
    partition.run_once()
    published("a", type="invoice")
    partition.run_once()
    partition.store()
    run("rare")
    assert len(seen) == 1


def test_a_place_of_a_connection_that_has_ended_is_not_stored(alias, publish_old, run):
    """The server may have crashed, and lost what the place is made of."""
    subscriber("rare", types=["invoice"])(list.clear)
    run("rare")
    publish_old()
    partition = Partition(subscriber_named("rare"), 0)
    partition.run_once()
    before = Cursor.objects.using(alias).values().get()
    connections[alias].close()
    partition.store()
    assert Cursor.objects.using(alias).values().get() == before


def test_connections_that_are_often_replaced(alias, publish_old, run):
    """As by a pooler, or by a neighbour that fails: a cursor that is read again is as old."""
    subscriber("rare", types=["invoice"])(list.clear)
    run("rare")
    now = 0.0
    partition = Partition(subscriber_named("rare"), 0, clock=lambda: now)
    publish_old()
    while now <= 2 * STORE_SECONDS:
        partition.run_once()
        connections[alias].close()
        now += STORE_SECONDS / 2
    assert unpruned(alias) == 0
