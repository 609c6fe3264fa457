"""Killed processes, and lost replies to COMMIT: published events equal committed transactions."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.db import DatabaseError, connections, transaction

from outbox_app.database.clock import DatabaseNow
from outbox_app.events.models import Event
from outbox_app.models import Incident, Lease
from outbox_app.prepared import fence, prepared
from outbox_app.prepared import sender as senders
from outbox_app.prepared.checking_back import CheckBack
from outbox_app.prepared.models import Fence, PreparedEvent
from tests import emptying, forking
from tests.faults.tools import ROOT, on
from tests.patience import eventually, patience
from tests.servers import Proxy, processes

from .conftest import FULL

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"]),
    pytest.mark.system,
]
COMMITS = 200 if FULL else 4
PAST = timedelta(seconds=-1)


def settle(alias: str) -> None:
    """Ask about all that is open, now."""
    rows = PreparedEvent.objects.using(alias)
    rows.open().update(next_check_at=DatabaseNow() + PAST)
    CheckBack(using=alias).run(once=True)
    assert not rows.open().exists()


def assert_published_is_committed(alias: str, sender: str) -> None:
    committed = sorted(Group.objects.using(sender).values_list("name", flat=True))
    assert sorted(Event.objects.using(alias).values_list("stream", flat=True)) == committed
    assert not Incident.objects.using(alias).exists()
    confirmed = PreparedEvent.objects.using(alias).filter(state="confirmed")
    assert sorted(confirmed.values_list("stream", flat=True)) == committed


#: By point: the state that is left there, and whether the transaction has committed.
POINTS = {
    "prepared": ("prepared", False),  # the keeper has recorded it, and nobody knows
    "fenced": ("prepared", False),
    "written": ("prepared", False),
    "failed": ("cancelled", False),
    "committed": ("prepared", True),
    "decided": ("prepared", True),  # the keeper, in its transaction
    "decided_committed": ("confirmed", True),
    "none": ("confirmed", True),
}


def test_killed_at_each_point(alias: str, sender: str, environment: Any) -> None:
    payer = forking.Popen(
        [sys.executable, "-m", "tests.prepared.payer"],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment(alias),
    )
    processes.guard_process(payer.pid)
    assert payer.stdin
    assert payer.stdout
    try:
        for number, point in enumerate(POINTS):
            payer.stdin.write(f"{number} {sender} {point}\n")
            payer.stdin.flush()
            ended = payer.stdout.readline().strip()
            assert ended == {"none": "0", "failed": "1"}.get(point, str(-signal.SIGKILL)), point
            row = PreparedEvent.objects.using(alias).get(stream=f"order-{number}")
            state, committed = POINTS[point]
            eventually(lambda: not sessions(sender))  # of the killed one: it is rolled back
            assert row.state == state, point
            assert Event.objects.using(alias).filter(stream=row.stream).exists() == (
                state == "confirmed"
            )
            assert Group.objects.using(sender).filter(name=row.stream).exists() == committed
    finally:
        payer.kill()
        payer.communicate()
        processes.forget_process(payer.pid)
    settle(alias)
    assert_published_is_committed(alias, sender)


def sessions(using: str) -> int:
    """Other sessions that have a transaction open."""
    sql = {
        "postgresql": "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() "
        "AND pid <> pg_backend_pid() AND xact_start IS NOT NULL",
        "mysql": "SELECT count(*) FROM information_schema.innodb_trx "
        "WHERE trx_mysql_thread_id <> CONNECTION_ID()",
    }.get(connections[using].vendor)
    if sql is None:
        return 0
    with connections[using].cursor() as cursor:
        cursor.execute(sql)
        return int(cursor.fetchone()[0])


def test_a_process_that_asks_is_killed(
    alias: str, sender: str, environment: Any, make: Any, pay: Any, tmp_path: Any, states: Any
) -> None:
    """Another one takes over when the lease has run out, and asks again."""
    pay(make())
    log = tmp_path / "run_prepared.log"
    asker = processes.spawn(
        [sys.executable, "manage.py", "run_prepared", "--interval", "0.1"],
        log=log,
        folder=ROOT,
        environment={
            **environment(alias),
            "OUTBOX_LEASE_SECONDS": "1",
            "OUTBOX_FAILPOINT": "check_claimed=kill",
        },
        user=None,
        popen=forking.Popen,
    )
    assert asker.wait(patience()) == -signal.SIGKILL, log.read_text()
    processes.forget_process(asker.pid)
    row = PreparedEvent.objects.using(alias).annotate(now=DatabaseNow()).get()
    assert (row.state, row.asked) == ("prepared", 1)
    assert row.next_check_at > row.now
    assert Lease.objects.using(alias).filter(resource="prepared", owner__isnull=False).exists()
    PreparedEvent.objects.using(alias).update(next_check_at=DatabaseNow() + PAST)
    loop = CheckBack(using=alias, interval=0.05, lease_seconds=1)
    loop.on_turn = lambda loop: loop.stop() if loop.done else None
    loop.run()
    assert states() == ["confirmed"]


@contextmanager
def behind(using: str, port: int) -> Iterator[None]:
    """Connect to a database by another port."""
    settings = connections.settings[using]
    there = {name: settings[name] for name in ("HOST", "PORT")}
    connections[using].close()
    settings.update(HOST="127.0.0.1", PORT=str(port))
    try:
        yield
    finally:
        connections[using].close()
        settings.update(there)


@pytest.fixture
def link(sender: str) -> Iterator[Proxy]:
    """The sender's database is behind a proxy."""
    settings = connections.settings[sender]
    with Proxy(settings["HOST"], int(settings["PORT"])) as proxy, behind(sender, proxy.port):
        yield proxy


def fail_at_commit(using: str, fail: Callable[[], None], heal: Callable[[], None]) -> None:
    """Call ``fail`` before the next COMMIT, and ``heal`` after it."""
    connection = connections[using]
    original = connection._commit

    def commit() -> None:
        connection._commit = original
        fail()
        try:
            original()
        finally:
            heal()

    connection._commit = commit


@on("default", "postgres")  # senders with a network: PostgreSQL, MariaDB
@pytest.mark.parametrize("arrives", [True, False])
@pytest.mark.timeout(600 if FULL else 120)
def test_the_reply_to_commit_is_lost(
    alias: str, sender: str, arrives: bool, link: Proxy, told: Any
) -> None:
    """The caller cannot know; its fence does."""

    def cut() -> None:
        if arrives:
            link.mode = "cut_on_reply"
        else:
            link.mode = "blackhole"
            threading.Timer(0.05, link.cut).start()

    for number in range(COMMITS):

        def pay(number: int = number) -> None:
            with prepared(f"order-{number}", "order.paid", {}, using=sender, immune=0):
                Group.objects.using(sender).create(name=f"order-{number}")
                fail_at_commit(sender, cut, lambda: setattr(link, "mode", "pass"))

        with pytest.raises(DatabaseError):
            pay()
    told()
    eventually(lambda: not sessions(sender))
    settle(alias)
    assert Group.objects.using(sender).count() == (COMMITS if arrives else 0)
    assert_published_is_committed(alias, sender)


@on("default", "postgres")
def test_the_senders_database_is_away_after_the_commit(
    alias: str, sender: str, link: Proxy, told: Any, states: Any
) -> None:
    """Then nothing is told: cancelling by guess would lose a committed event."""

    def cut() -> None:
        link.mode = "cut_on_reply"

    def pay() -> None:
        with prepared("order-1", "order.paid", {}, using=sender, immune=0):
            Group.objects.using(sender).create(name="order-1")
            fail_at_commit(sender, cut, refuse)

    def refuse() -> None:
        link.mode = "refuse"

    with suppress(DatabaseError):
        pay()
    told()
    assert states() == ["prepared"]
    link.mode = "pass"
    assert [row.outcome for row in Fence.objects.using(sender).all()] == ["committed"]
    settle(alias)
    assert_published_is_committed(alias, sender)


@on("default")
def test_a_sender_behind_pgbouncer(
    alias: str, sender: str, pooler: int, make: Any, pay: Any, ask: Any, states: Any
) -> None:
    """What a session is told for an answer does not stay with those who get it next."""
    with behind(sender, pooler):
        event, other = make(), make()
        with transaction.atomic(using=sender):
            fence(event)
            outcomes = {event.event_id: "in_progress", other.event_id: "rolled_back"}
            assert senders._outcomes([event, other]) == outcomes
        ask()
        assert states() == ["confirmed", "cancelled"]
        others = [connections.create_connection(sender) for _ in range(3)]
        for connection in others:
            connection.set_autocommit(False)
            with connection.cursor() as cursor:
                cursor.execute("SHOW lock_timeout")
                assert cursor.fetchone() == ("0",)
        for connection in others:
            connection.close()


@on("postgres", "mariadb")
def test_the_keeper_loses_its_sessions(
    alias: str, sender: str, make: Any, pay: Any, states: Any
) -> None:
    """As when its database is restarted: the process that asks goes on."""
    # Threads of calls of the test before would lose theirs as well, and be used by the next test.
    eventually(lambda: not senders.calls.threads)
    loop = CheckBack(using=alias, interval=0.05, lease_seconds=2)

    def run() -> None:
        try:
            loop.run()
        finally:
            connections.close_all()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        for number in range(3):
            eventually(lambda: Lease.objects.using(alias).filter(owner__isnull=False).exists())
            emptying.end_other_sessions(connections[alias])
            pay(make(f"order-{number}"))
            eventually(lambda n=number: states() == ["confirmed"] * (n + 1))
    finally:
        loop.stop()
        thread.join(patience())
    assert not thread.is_alive()
