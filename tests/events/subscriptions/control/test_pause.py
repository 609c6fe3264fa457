"""After pause() no process handles an event; after resume() each goes on exactly where it was."""

from __future__ import annotations

import threading
from functools import partial

import pytest
from django.db import OperationalError, connections

from outbox_app.events import subscriber
from outbox_app.events.exceptions import ReplayRefused, UnknownSubscription
from outbox_app.events.models import Cursor, Subscription
from outbox_app.events.subscriptions import control
from tests.emptying import cut_off
from tests.events.log.sessions import Session
from tests.faults.tools import eventually, on
from tests.patience import patience

pytestmark = pytest.mark.django_db(transaction=True)


def test_nothing_is_handled_while_it_is_paused(alias, published, run, seen_by):
    seen = seen_by("all")
    published("a")
    run("all")
    control.pause("all")
    published("a", "b")
    assert run("all") == 0
    control.resume("all")
    assert run("all") == 2
    assert seen == [("a", 1), ("a", 2), ("b", 1)]


def test_pause_before_the_first_run(alias, published, run, seen_by):
    seen = seen_by("new", partitions=3)
    control.pause("new")
    published("a")
    assert run("new") == 0
    assert not Cursor.objects.using(alias).exists()
    assert Subscription.objects.using(alias).get().partitions == 3
    control.resume("new")
    run("new")
    assert seen == [("a", 1)]


def test_others_are_left_alone(alias, published, run, seen_by):
    """One that has stopped, because its effects may be there in part, goes on stopping."""
    seen_by("all")
    seen_by("other")
    published("a")
    run("all", "other")
    other = Cursor.objects.using(alias).filter(subscription="other")
    other.update(error="TransactionEnded: by its handler", retry_at=None)
    before = other.values().get()
    control.pause("all")
    control.resume("all")
    assert other.values().get() == before


@pytest.mark.slow
def test_pause_under_load(alias, published, running, seen_by):
    """A runner that is in the middle of a backlog handles nothing after pause has returned."""
    seen = seen_by("busy", batch_size=1, partitions=2)
    streams = [[f"s{round}-{i}" for i in range(100)] for round in range(3)]
    with running("busy") as runner:
        [worker] = runner.workers

        def beats(since):
            return worker.holder._beaten_at != since

        for some in streams:
            before = len(seen)
            published(*some)  # now: on SQLite the pause before may have waited for all there was
            eventually(lambda before=before: len(seen) > before + 2, "it handles")
            control.pause("busy")
            counted = len(seen)
            for _ in range(2):  # it has noticed, and looked again: still nothing
                beaten = worker.holder._beaten_at
                eventually(lambda beaten=beaten: beats(beaten), "a beat")
            assert worker.paused
            assert len(seen) == counted
            control.resume("busy")
        eventually(lambda: len(seen) == 300, "the rest")
    assert sorted(seen) == sorted((stream, 1) for some in streams for stream in some)


def test_pause_waits_for_the_page_that_is_being_handled(alias, published, running):
    inside, go_on, paused = threading.Event(), threading.Event(), threading.Event()
    seen = []

    @subscriber("slow", batch_size=1)
    def handle(events):
        inside.set()
        assert go_on.wait(patience())
        assert not paused.is_set(), "handled after pause has returned"
        seen.append(events[0].stream)

    def pause():
        control.pause("slow")
        paused.set()
        connections[alias].close()

    published("a", "b")
    with running("slow"):
        assert inside.wait(patience())
        thread = threading.Thread(target=pause)
        thread.start()
        go_on.set()
        assert paused.wait(patience())
        thread.join(patience())
    handled = len(seen)
    assert handled in (1, 2)  # the second page may have begun before the pause
    assert Cursor.objects.using(alias).get().handled == handled


def test_pause_between_the_read_of_a_page_and_its_transaction(alias, published, seen_by):
    """The interleaving by hand: the page was read, then it is paused, then it is handled."""
    from outbox_app.events.subscriptions.cursors import Paused
    from outbox_app.events.subscriptions.partition import Partition
    from outbox_app.events.subscriptions.repartition import adopt_partitions
    from outbox_app.events.subscriptions.subscriber import subscriber_named

    seen = seen_by("all", batch_size=1)
    published("a", "b")
    Subscription.objects.using(alias).create(name="all")
    adopt_partitions(subscriber_named("all"), using=alias)
    partition = Partition(subscriber_named("all"), 0)
    try:
        partition.run_once()
        assert seen == [("a", 1)]
        control.pause("all")
        assert partition.run_once()  # overtaken: it looks again at once …
        with pytest.raises(Paused):
            partition.run_once()  # … and finds it paused
        assert seen == [("a", 1)]
        control.resume("all")
        partition.run_once()
        assert seen == [("a", 1), ("b", 1)]
    finally:
        partition.close()


def test_an_unknown_subscription(alias):
    for act in (control.pause, control.resume, partial(control.replay, place="beginning")):
        with pytest.raises(UnknownSubscription, match="No subscription is named 'nobody'"):
            act("nobody", using=alias)
    assert not Subscription.objects.using(alias).exists()


def test_one_that_the_code_has_no_more_can_be_paused(alias):
    Subscription.objects.using(alias).create(name="old")
    control.pause("old")
    assert Subscription.objects.using(alias).get().paused


@on("postgres", "mariadb")
def test_a_page_that_does_not_end_is_not_waited_for_for_ever(
    alias, published, running, monkeypatch
):
    monkeypatch.setattr(control, "LOCK_SECONDS", 1)
    inside, go_on = threading.Event(), threading.Event()

    @subscriber("stuck")
    def handle(events):
        inside.set()
        assert go_on.wait(patience())

    published("a")
    with running("stuck"):
        try:
            assert inside.wait(patience())
            with pytest.raises(ReplayRefused, match="has to end first"):
                control.pause("stuck")
            assert not Subscription.objects.using(alias).get().paused
        finally:
            go_on.set()


@on("postgres", "mariadb")
def test_a_connection_that_is_lost_is_no_page_that_is_handled(alias):
    Subscription.objects.using(alias).create(name="old")
    with pytest.raises(OperationalError), control.locked("old", alias):
        cut_off(alias)


@on("postgres", "mariadb")
def test_two_acts_on_a_subscription_wait_for_one_another(alias, run, seen_by):
    seen_by("all")
    run("all")
    with Session(alias) as other, control.locked("all", alias):
        other.begin()
        rows = Subscription.objects.using(alias).select_for_update(nowait=True)
        with pytest.raises(OperationalError):
            other.do(rows.first)


def test_a_resume_hides_no_error_of_a_handler(alias, published, run):
    @subscriber("fails")
    def handle(events):
        raise ValueError("why")

    published("a")
    run("fails")
    control.resume("fails")
    cursor = Cursor.objects.using(alias).get()
    assert (cursor.failures, cursor.error[:15]) == (1, "ValueError: why")
