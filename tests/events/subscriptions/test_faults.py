"""Processes are killed, frozen, started twice: each event has its effects once, in order."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections import Counter
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from django.db import OperationalError, connections

from outbox_app.database.transaction_guard import SwallowedError
from outbox_app.events import subscriber
from outbox_app.events.models import Cursor, Event, ParkedStream, Subscription
from outbox_app.events.subscriptions import control
from outbox_app.events.subscriptions import subscriber as module
from outbox_app.events.subscriptions.control import release
from outbox_app.events.subscriptions.cursors import CursorConflict, StoredRows
from outbox_app.events.subscriptions.partition import Partition
from outbox_app.events.subscriptions.runner import Runner
from outbox_app.events.subscriptions.subscriber import subscriber_named
from outbox_app.exceptions import OutboxError
from outbox_app.failpoints import set_failpoint
from outbox_app.models import InboxEntry, Incident, Process
from outbox_app.process.lease import LeaseHolder
from tests import forking
from tests.faults.tools import ROOT, eventually, on
from tests.patience import patience
from tests.servers import processes
from tests.subscribers import note

pytestmark = pytest.mark.django_db(transaction=True)

POINTS = ["page_read", "advanced", "handled", "committed"]
STREAMS = ["a", "b", "c"]


def test_a_database_that_is_away_is_asked_for_one_only(alias, seen_by, monkeypatch):
    """Each question may take seconds, and a supervisor kills what takes long to end."""
    asked = []

    def leave(holder):
        asked.append(holder.resource)
        raise OperationalError

    for name in "abc":
        seen_by(name)
    runner = Runner([subscriber_named(name) for name in "abc"])
    monkeypatch.setattr(LeaseHolder, "leave", leave)
    runner.run(once=True)
    assert asked == ["subscription:a"] * 2


class Subprocess:
    """``manage.py run_subscriptions`` as a real process, with the subscription ``noted``."""

    def __init__(self, *arguments: str, environment: dict[str, str], log: Any, **declared: Any):
        self.log = log
        variables = {
            **environment,
            "OUTBOX_TEST_SUBSCRIBER": json.dumps({"name": "noted", "batch_size": 5, **declared}),
            "OUTBOX_LEASE_SECONDS": "2",
        }
        self.popen = processes.spawn(
            [sys.executable, "manage.py", "run_subscriptions", "--interval", "0.1", *arguments],
            log=log,
            folder=ROOT,
            environment=variables,
            user=None,
            popen=forking.Popen,
        )

    def wait(self) -> int:
        code = self.popen.wait(patience(60))
        processes.forget_process(self.popen.pid)
        return code

    def kill(self) -> None:
        if self.popen.poll() is None:
            processes.kill_trees([self.popen.pid])
        self.wait()


@pytest.fixture
def start(alias, environment, tmp_path):
    """``start(…)``: start a process. Processes that are left are killed after the test."""
    started: list[Subprocess] = []

    def make(*arguments: str, failpoint: str = "", **declared: Any) -> Subprocess:
        variables = environment(alias)
        if failpoint:
            variables["OUTBOX_FAILPOINT"] = failpoint
        log = tmp_path / f"process{len(started)}.log"
        started.append(Subprocess(*arguments, environment=variables, log=log, **declared))
        return started[-1]

    yield make
    for each in started:
        if each.popen.poll() is None:
            os.kill(each.popen.pid, signal.SIGCONT)
            each.kill()


def noted(alias):
    return list(Incident.objects.using(alias).order_by("id").values_list("detail", "first_id"))


def assert_exact(alias, versions):
    """Each version of each stream was handled once, in order."""
    seen = noted(alias)
    assert {s: [v for t, v in seen if t == s] for s in STREAMS} == {
        stream: list(range(1, versions + 1)) for stream in STREAMS
    }


@pytest.mark.parametrize("point", POINTS)
def test_killed_anywhere(alias, published, start, point):
    published(*STREAMS * 6)
    killed = start("--once", failpoint=f"{point}=kill@2")
    assert killed.wait() == -signal.SIGKILL, killed.log.read_text()
    assert len(noted(alias)) < 18
    published(*STREAMS)
    start()
    eventually(lambda: len(noted(alias)) >= 21, "the second one has handled all")
    assert_exact(alias, 7)


def test_killed_between_two_partitions_of_one_page(alias, published, start, monkeypatch):
    """Some have stored where the page ends, and others have not: each event is handled once."""
    streams = [f"s{n}" for n in range(8)]
    published(*streams * 4)
    killed = start("--once", failpoint="committed=kill@2", partitions=4)
    assert killed.wait() == -signal.SIGKILL, killed.log.read_text()
    cursors = Cursor.objects.using(alias)
    assert sorted(cursors.values_list("revision", flat=True)) == [0, 0, 1, 1]
    passed = max(cursors.values_list("position", flat=True))
    assert Event.objects.using(alias).filter(pk__lte=passed).count() > 5, "of more than one read"
    published(*streams)
    Process.objects.using(alias).all().delete()  # its lease has run out
    monkeypatch.setenv("OUTBOX_ALIAS", alias)
    subscriber("noted", partitions=4, batch_size=5)(note)
    Runner([subscriber_named("noted")]).run(once=True)
    seen = noted(alias)
    assert {s: [v for t, v in seen if t == s] for s in streams} == {
        stream: list(range(1, 6)) for stream in streams
    }


@pytest.mark.parametrize("point", POINTS)
def test_frozen_anywhere(alias, published, start, point):
    """Another one takes over; what the frozen one had in hand is handled once."""
    published(*STREAMS * 6)
    frozen = start(failpoint=f"{point}=stop@2")
    eventually(lambda: _state(frozen.popen.pid) == "T", "it is frozen")
    start()
    if point in ("page_read", "committed"):  # between, it holds the cursor's lock
        eventually(lambda: len(noted(alias)) >= 18, "the second one has taken over")
        assert_exact(alias, 6)
    os.kill(frozen.popen.pid, signal.SIGCONT)
    published(*STREAMS)
    eventually(lambda: len(noted(alias)) >= 21, "all is handled")
    assert_exact(alias, 7)


@on("postgres")
def test_the_second_one_waits_and_takes_over(alias, published, start):
    first = start()
    eventually(lambda: Process.objects.using(alias).count() == 1, "the first one runs")
    second = start()
    eventually(lambda: Process.objects.using(alias).count() == 2, "the second one runs")
    published(*STREAMS)
    eventually(lambda: len(noted(alias)) >= 3, "handled")
    first.kill()
    published(*STREAMS)
    eventually(lambda: len(noted(alias)) >= 6, "handled")
    second.kill()
    published(*STREAMS)
    start()
    eventually(lambda: len(noted(alias)) >= 9, "taken over from both")
    assert_exact(alias, 3)


@on("postgres")
def test_a_stop_finishes_the_page_and_hands_back(alias, published, start):
    process = start(partitions=4)
    published(*STREAMS * 10)
    eventually(lambda: len(noted(alias)) >= 30, "handled")
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait() == 0
    assert not Process.objects.using(alias).exists()
    assert "Subscriptions stopped handled=30" in process.log.read_text()


def test_a_stop_waits_for_no_other_partition(alias, published):
    @subscriber("stopped", partitions=4)
    def handle(events):
        runner.stop()

    published("a", "b")
    runner = Runner([subscriber_named("stopped")])
    assert runner.run() == 1
    assert not Process.objects.using(alias).exists()


def test_a_stop_waits_for_no_other_stream_that_is_released(alias, published, run):
    poison = ["a", "b", "c"]

    @subscriber("stopped", on_error="park")
    def handle(events):
        if poison:
            raise ValueError
        runner.stop()

    published(*poison)
    for _ in range(3):
        run("stopped")
    assert release("stopped", using=alias) == 3
    poison.clear()
    runner = Runner([subscriber_named("stopped")])
    assert runner.run() == 1
    assert ParkedStream.objects.using(alias).count() == 2


@on("postgres", "mariadb")
def test_several_processes_share_the_partitions(alias, published, start):
    published(*STREAMS * 10)
    process = start("--processes", "3", partitions=4)
    eventually(lambda: len(noted(alias)) >= 30, "handled")
    assert_exact(alias, 10)
    process.popen.send_signal(signal.SIGTERM)
    assert process.wait() == 0


@pytest.mark.parametrize("point", POINTS)
def test_the_partition_goes_on_after_an_end_in_the_middle(alias, published, point):
    """The same without a process: the next one finds the cursor and the effects together."""
    published(*STREAMS * 2)
    handle = []

    @subscriber("noted", batch_size=2)
    def note(events):
        rows = [
            Incident(kind="unknown", detail=e.stream, first_id=e.version, last_id=0) for e in events
        ]
        Incident.objects.using(alias).bulk_create(rows)
        handle.append(1)

    Subscription.objects.using(alias).create(name="noted")

    def end() -> None:
        set_failpoint(point, None)
        raise KeyboardInterrupt

    set_failpoint(point, end)
    one = Partition(subscriber_named("noted"), 0)
    with pytest.raises(KeyboardInterrupt):
        _exhaust(one)
    one.close()
    other = Partition(subscriber_named("noted"), 0)
    _exhaust(other)
    other.close()
    assert_exact(alias, 2)


def test_two_owners_of_one_page(alias, published):
    """The lease may fail; the cursor does not: the second one finds that it was overtaken."""
    published(*STREAMS)
    seen = []
    subscriber("noted")(seen.extend)
    Subscription.objects.using(alias).create(name="noted")
    one, other = (Partition(subscriber_named("noted"), 0) for _ in range(2))
    set_failpoint("page_read", lambda: (set_failpoint("page_read", None), other.run_once()))
    one.take_cursors(StoredRows(one.subscriber, [0]))
    with pytest.raises(CursorConflict):
        one._process_page(one.cursors[0])
    one.run_once()
    assert [event.stream for event in seen] == STREAMS
    one.close()
    other.close()


def test_a_handler_that_swallows_an_error_of_the_database(alias, published, run):
    @subscriber("swallows")
    def handle(events):
        InboxEntry.objects.using(alias).create(job_id="x", task="")
        try:
            InboxEntry.objects.using(alias).create(job_id="x", task="")
        except Exception:
            from django.db import transaction

            transaction.set_rollback(True, using=alias)

    published("a")
    run("swallows")
    cursor = Cursor.objects.using(alias).get()
    assert SwallowedError.__name__ in cursor.error
    assert "swallows" in cursor.error
    assert not cursor.handled
    assert not InboxEntry.objects.using(alias).exists()


def test_one_that_fails_does_not_hold_up_another(alias, published, run):
    seen = []

    @subscriber("fails")
    def fail(events):
        raise ValueError("always")

    subscriber("works")(seen.extend)
    published("a", "b")
    assert run("fails", "works") == 2
    assert len(seen) == 2


def test_it_is_tried_again_with_pauses_that_grow(alias, published):
    attempts, now = [], [0.0]

    @subscriber("fails")
    def fail(events):
        attempts.append(now[0])
        raise ValueError("always")

    published("a")
    Subscription.objects.using(alias).create(name="fails")
    partition = Partition(subscriber_named("fails"), 0, clock=lambda: now[0])
    for _ in range(4000):
        partition.run_once()
        now[0] += 0.05
    partition.close()
    pauses = [after - before for before, after in pairwise(attempts)]
    assert pauses[0] < 0.4
    assert max(pauses) < 61
    assert all(after >= 1.5 * before or after > 50 for before, after in pairwise(pauses))
    assert Cursor.objects.using(alias).get().failures == len(attempts)


def test_an_error_is_over_with_the_event_that_was_deleted(alias, published, run):
    @subscriber("fails")
    def fail(events):
        raise ValueError("always")

    published("a")
    run("fails")
    cursors = Cursor.objects.using(alias)
    assert cursors.get().error
    Event.objects.using(alias).filter(stream="a").delete()
    run("fails")
    assert (cursors.get().error, cursors.get().failures) == ("", 0)


def test_a_damaged_cursor_stands_still_and_says_so(alias, published, run):
    seen = []
    subscriber("noted")(seen.extend)
    published("a")
    run("noted")
    Cursor.objects.using(alias).update(state='{"window": "nothing"}')
    published("b")
    assert run("noted") == 0
    cursor = Cursor.objects.using(alias).get()
    assert "cannot be read" in cursor.error
    assert (cursor.state, len(seen)) == ('{"window": "nothing"}', 1)


def test_more_partitions_take_over_where_the_old_ones_stand(alias, published, run):
    seen = []
    streams = [f"s{i}" for i in range(30)]

    def declare(partitions):
        from outbox_app.events.subscriptions import subscriber as module

        module._subscribers.pop("noted", None)

        @subscriber("noted", partitions=partitions, batch_size=7)
        def note(events):
            seen.extend((event.stream, event.version) for event in events)

    declare(2)
    published(*streams)
    run("noted")
    declare(6)
    published(*streams)
    run("noted")
    assert sorted(seen) == sorted((s, v) for s in streams for v in (1, 2))
    declare(4)  # no multiple of 6: a person has to say so
    published(*streams)
    runner = Runner([subscriber_named("noted")])
    assert runner.run(once=True) == 0
    assert "repartition" in runner.trouble
    assert len(seen) == 60


@pytest.mark.parametrize("chosen", [2, 8])
def test_a_rolling_deployment_and_its_way_back(alias, published, start, chosen):
    """Old and new code side by side, in real processes: what a person has chosen stays."""

    def said(process):
        return "Leases released" in process.log.read_text()

    def change(partitions):
        module._subscribers.pop("noted", None)
        subscriber("noted", partitions=partitions)(list.clear)

        def try_to():
            with suppress(OutboxError):  # until all partitions have caught up
                return control.repartition("noted")

        return eventually(try_to, "the change of the number")

    def handle(version):
        published(*streams)
        total = version * len(streams)
        eventually(lambda: len(noted(alias)) >= total, f"{total} events are handled")

    row = Subscription.objects.using(alias)
    streams, other = [f"s{number}" for number in range(30)], {2: 8, 8: 2}[chosen]
    old = start(partitions=other)
    handle(1)
    assert change(chosen) == (other, chosen)
    new = start(partitions=chosen)
    handle(2)
    eventually(lambda: said(old), "the old code stands aside")
    assert row.get().partitions == chosen
    old.popen.terminate()
    assert old.wait() == 0
    handle(3)
    again = start(partitions=other)  # a straggler, or the old release once more
    eventually(lambda: said(again), "the old code stands aside again")
    handle(4)
    assert row.get().partitions == chosen
    assert change(other) == (chosen, other)
    handle(5)
    eventually(lambda: said(new), "the new code stands aside")
    assert row.get().partitions == other
    assert Counter(noted(alias)) == Counter({(s, v): 1 for s in streams for v in range(1, 6)})


def _exhaust(partition: Partition) -> None:
    while partition.run_once():
        pass


def _state(pid: int) -> str:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0]


@on("default", "mariadb")
@pytest.mark.mariadb_only
def test_a_row_edited_into_nonsense_stops_its_subscription_only(alias, published, run):
    """PostgreSQL and MySQL refuse such an edit."""
    unchecked = {
        "default": "PRAGMA ignore_check_constraints = {:d}",
        "mariadb": "SET check_constraint_checks = {:d}",
    }[alias]
    subscriber("reads")(list.clear)
    subscriber("reads-a", topics=["a"])(list.clear)
    published("a", "b")
    with connections[alias].cursor() as cursor:
        cursor.execute(unchecked.format(alias == "default"))
        cursor.execute("UPDATE outbox_event SET data = '{nonsense' WHERE stream = 'b'")
        cursor.execute(unchecked.format(alias != "default"))
    assert run("reads", "reads-a") == 0
    errors = dict(Cursor.objects.using(alias).values_list("subscription", "error"))
    assert "JSONDecodeError" in errors["reads"]
    assert errors["reads-a"] == ""
