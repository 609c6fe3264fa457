"""A living drainer has lost its shards without noticing: each duplicate has its incident.

A virtual machine freezes with its clocks; a step of the database's clock makes a living drainer
look silent. Both drainers run here, step by step, so that they interleave at the critical points.
"""

from __future__ import annotations

import time
from datetime import timedelta

import pytest
from django.db import OperationalError, connections

from outbox_app.database.clock import DatabaseNow
from outbox_app.exceptions import LeaseLost
from outbox_app.failpoints import set_failpoint
from outbox_app.jobs.drain.drain import Drain
from outbox_app.models import Incident, Process
from outbox_app.process import lease
from outbox_app.process.lease import LeaseHolder
from tests import tasks
from tests.faults.tools import Book

from .test_lease import clock, die

__all__ = ["clock"]

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def app(redis_url, make_app):
    app = make_app(redis_url)
    app.task(name="note")(tasks.note)
    return app


@pytest.fixture
def two(alias, clock):
    """A frozen drainer, with its clock, and the drainer that has taken over its shards."""
    frozen, heir = Drain(using=alias), Drain(using=alias)
    frozen.holder.clock = clock
    frozen.run_once()
    die(frozen.holder)
    heir.run_once()
    assert len(heir.holder.owned) == 128
    assert not Incident.objects.using(alias).exists()  # nothing was there to be sent twice
    return frozen, heir


def publish_twice(frozen, heir):
    """Let the heir publish what the other one has published, and not deleted yet."""

    def meanwhile():
        set_failpoint("published_not_deleted", None)
        drain_all(heir)

    set_failpoint("published_not_deleted", meanwhile)
    try:
        drain_all(frozen)
    finally:
        set_failpoint("published_not_deleted", None)


def drain_all(drain):
    for _ in range(5):
        drain.run_once()


def learn(drain, clock):
    clock.now += 60
    with pytest.raises(LeaseLost):
        drain.run_once()


def test_what_it_sent_since_its_last_heartbeat(alias, app, two, clock):
    frozen, heir = two
    jobs = Book(using=alias)
    jobs.stage(app, 36)
    publish_twice(frozen, heir)
    assert not Incident.objects.using(alias).exists()

    learn(frozen, clock)
    frozen.run_once()

    jobs.receive(app)
    assert jobs.twice
    jobs.assert_complete()
    incident = Incident.objects.using(alias).get()
    assert incident.kind == Incident.Kind.TAKEOVER
    assert str(frozen).split("(")[0] in incident.drainer
    for drain in two:
        drain.holder.leave()


def test_the_incident_is_owed_while_the_database_is_away(alias, app, two, clock):
    frozen, heir = two
    jobs = Book(using=alias)
    jobs.stage(app, 36)
    publish_twice(frozen, heir)
    learn(frozen, clock)

    def fail(execute, sql, *args):
        if sql.startswith("INSERT") and "outbox_incident" in sql:
            raise OperationalError("failed on purpose")
        return execute(sql, *args)

    with connections[alias].execute_wrapper(fail), pytest.raises(OperationalError):
        frozen.run_once()
    assert not frozen.holder.joined
    frozen.run_once()
    jobs.receive(app)
    jobs.assert_complete()


def test_it_learns_it_when_it_leaves(alias, app, two):
    frozen, heir = two
    jobs = Book(using=alias)
    jobs.stage(app, 36)
    publish_twice(frozen, heir)
    frozen._leave()
    jobs.receive(app)
    assert jobs.twice
    jobs.assert_complete()


def test_it_learns_it_within_a_batch(alias, app, two, clock):
    """Its heartbeats come before sends; what was sent of the batch by then counts."""
    frozen, heir = two
    frozen._find_apps()
    jobs = Book(using=alias)
    jobs.stage(app, 4, key="one")
    frozen._find_apps()
    [lane] = frozen._apps.values()
    lane._publisher = lane._find_publisher()
    lane._publisher._takes_batches = lambda: False  # one by one
    sent = []

    def before_each():
        sent.append(1)
        if len(sent) == 3:
            drain_all(heir)
            clock.now += 60

    set_failpoint("checked", before_each)
    try:
        with pytest.raises(LeaseLost):
            frozen.run_once()
    finally:
        set_failpoint("checked", None)
    frozen.run_once()
    jobs.receive(app)
    assert jobs.twice
    jobs.assert_complete()


def test_a_drainer_that_keeps_its_shards_records_nothing(alias, app, clock):
    drain = Drain(using=alias)
    drain.holder.clock = clock
    jobs = Book(using=alias)
    jobs.stage(app, 36)
    drain_all(drain)
    clock.now += drain.holder.lease_seconds / 2
    drain_all(drain)
    die(drain.holder)
    heir = Drain(using=alias)
    heir.run_once()
    learn(drain, clock)
    drain.run_once()
    drain._leave()
    heir._leave()
    jobs.receive(app)
    jobs.assert_exact()


@pytest.fixture
def watching(alias, clock):
    """A dead drainer, a living one, and a third one that watches both."""
    dead, living, looks = (
        LeaseHolder(using=alias, lease_seconds=10, parts=9, clock=clock) for _ in range(3)
    )
    for member in (dead, living, looks):
        member.join()
    return dead, living, looks


def set_back(alias, seconds):
    """As if the database's clock were set back: what it wrote before lies in the future."""
    Process.objects.using(alias).update(
        heartbeat_at=DatabaseNow() + timedelta(seconds=seconds),
    )


def test_the_database_s_clock_is_set_back_while_a_drainer_dies(alias, watching, clock):
    """What counts is whether its heartbeat changes, on the clock of the one that looks."""
    dead, living, looks = watching
    set_back(alias, 3600)
    for _ in range(7):
        clock.now += 2
        living.beat()
        looks.beat()
        looks.rebalance()
    ids = set(Process.objects.using(alias).values_list("id", flat=True))
    assert ids == {living.id, looks.id}
    with pytest.raises(LeaseLost):
        dead.beat()
    assert Process.objects.using(alias).filter(heartbeat_at__gt=DatabaseNow()).count() == 0


def test_one_that_comes_back_on_a_clock_that_was_set_back_is_not_buried(
    alias, watching, clock, monkeypatch
):
    """Its heartbeat arrives, earlier than the one before, after it was found silent."""
    slow, living, looks = watching
    set_back(alias, 3600)
    looks.rebalance()
    clock.now += 11
    living.beat()
    looks.beat()
    seen = {"beaten": False}

    def beat_meanwhile(execute, sql, *args):
        if sql.startswith("DELETE") and "outbox_process" in sql and not seen["beaten"]:
            seen["beaten"] = True
            slow.beat()
        return execute(sql, *args)

    with connections[alias].execute_wrapper(beat_meanwhile):
        looks.rebalance()
    assert seen["beaten"]
    slow.beat()


def test_a_slow_answer_is_no_silence(alias, watching, clock):
    """Nine seconds before an answer say nothing of what happened after it."""
    *_, looks = watching
    looks._seen = {}

    def wait(execute, sql, *args):
        result = execute(sql, *args)
        if sql.startswith("SELECT") and "heartbeat_at" in sql:
            clock.now += 9
        return result

    with connections[alias].execute_wrapper(wait):
        looks.rebalance()
    clock.now += 9
    looks.rebalance()
    assert Process.objects.using(alias).count() == 3


def test_the_clock_of_a_lease_counts_suspended_time(monkeypatch):
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    if boottime is None:
        assert abs(lease.elapsed() - time.monotonic()) < 60
        return
    # On a host that was never suspended the two clocks are equal.
    before, read = time.clock_gettime(boottime), time.clock_gettime
    suspended = 10**6
    monkeypatch.setattr(time, "clock_gettime", lambda c: read(c) + suspended * (c == boottime))
    assert before + suspended <= lease.elapsed() <= time.clock_gettime(boottime)
