"""The database goes away under a drainer: the same process recovers, and publishes nothing twice.

The tests kill connections and servers, which are private, so they do without pytest-django. The
drainer first deletes the rows that it had published before (its unsettled batches).
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import InterfaceError, OperationalError, connections

from outbox_app.entities.exceptions import CommandTimeout, EntityContended, OutcomeUnknown
from outbox_app.failpoints import set_failpoint
from outbox_app.models import StagedJob
from tests.entities.models import Account
from tests.entities.test_history import check
from tests.patience import patience

from .tools import QUICK, assert_handed_back, draining, eventually


@pytest.fixture
def at_failpoint():
    """``at_failpoint(name, action)``: call it once, when a drainer in this process gets there."""
    done = []

    def arm(name, action):
        def act():
            set_failpoint(name, None)
            action()
            done.append(name)

        set_failpoint(name, act)
        return done

    yield arm
    for name in ("claimed", "checked", "published_not_deleted", "deleted"):
        set_failpoint(name, None)


@pytest.fixture
def kill_connections(private_alias):
    """``kill_connections()``: kill the drainers' connections, but not this test's."""
    column = {"postgresql": "pg_backend_pid()", "mysql": "CONNECTION_ID()"}
    with connections[private_alias].cursor() as cursor:
        cursor.execute(f"SELECT {column[connections[private_alias].vendor]}")
        ours = cursor.fetchone()[0]

    def kill():
        killer = connections.create_connection(private_alias)
        with killer.cursor() as cursor:
            if killer.vendor == "postgresql":
                cursor.execute(
                    "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
                    "WHERE datname = current_database() AND pid NOT IN (pg_backend_pid(), %s)",
                    [ours],
                )
            else:
                cursor.execute(
                    "SELECT id FROM information_schema.processlist "
                    "WHERE db = DATABASE() AND id NOT IN (CONNECTION_ID(), %s)",
                    [ours],
                )
                for (id,) in cursor.fetchall():
                    cursor.execute(f"KILL {id}")
        killer.close()

    return kill


def test_connection_killed_while_idle(
    private_alias, redis_url, make_named_app, book, quick, kill_connections
):
    app, jobs = make_named_app(redis_url), book(private_alias)
    with draining(private_alias) as drainer:
        jobs.stage(app, 10)
        eventually(lambda: drainer.tally.published == 10)
        id = drainer.holder.id
        kill_connections()
        jobs.stage(app, 10)
        eventually(lambda: drainer.tally.published == 20, "it goes on")
        assert drainer.holder.id == id
    jobs.receive(app)
    jobs.assert_exact()
    assert_handed_back(private_alias)


@pytest.mark.parametrize("failpoint", ["claimed", "checked", "published_not_deleted", "deleted"])
def test_connection_killed_in_the_middle_of_a_batch(
    private_alias, failpoint, redis_url, make_named_app, book, quick, at_failpoint, kill_connections
):
    app, jobs = make_named_app(redis_url), book(private_alias)
    done = at_failpoint(failpoint, kill_connections)
    jobs.stage(app, 300)
    with draining(private_alias, batch_size=50):
        eventually(lambda: not StagedJob.objects.using(private_alias).exists(), "drained")
    assert done == [failpoint]
    jobs.receive(app)
    jobs.assert_exact()
    assert_handed_back(private_alias)


def test_connection_killed_while_one_by_one(
    private_alias, rabbitmq_url, make_named_app, book, quick, at_failpoint, kill_connections
):
    """The heartbeat fails between two messages: those that were confirmed are not sent again."""
    app, jobs = make_named_app(rabbitmq_url), book(private_alias)
    passed = []

    def between_two_messages():
        passed.append(1)
        if len(passed) == 10:
            kill_connections()
            drainer.holder._beaten_at -= QUICK["LEASE_SECONDS"] / 2  # a heartbeat is due

    jobs.stage(app, 100, key="one after the other")
    with draining(private_alias) as drainer:
        set_failpoint("checked", between_two_messages)
        eventually(lambda: not StagedJob.objects.using(private_alias).exists(), "drained")
    set_failpoint("checked", None)
    assert len(passed) > 10
    jobs.receive(app)
    jobs.assert_exact()


@pytest.mark.parametrize("failpoint", ["idle", "claimed", "published_not_deleted"])
def test_server_killed_and_restarted(
    private_alias, private_database, failpoint, redis_url, make_named_app, book, quick, at_failpoint
):
    app, jobs = make_named_app(redis_url), book(private_alias)
    killed = threading.Event()

    def kill():
        private_database.kill()
        killed.set()

    with draining(private_alias, batch_size=50) as drainer:
        jobs.stage(app, 10)
        eventually(lambda: not StagedJob.objects.using(private_alias).exists())
        if failpoint == "idle":
            kill()
        else:
            at_failpoint(failpoint, kill)
            jobs.stage(app, 200)
        assert killed.wait(patience(20))
        connections[private_alias].close()
        eventually(lambda: drainer.trouble, "it says that it is in trouble")
        private_database.start()
        jobs.stage(app, 10)
        eventually(lambda: not StagedJob.objects.using(private_alias).exists(), "drained")
        eventually(lambda: not drainer.trouble, "it says that all is well")
    jobs.receive(app)
    jobs.assert_exact()
    assert_handed_back(private_alias)


def test_commands_while_the_server_is_killed_and_restarted(private_alias, private_database):
    """Each command is repeated until it is answered; what was answered is there, once."""
    told, lost = [], []
    Account.execute("hot", "open", {"owner": "x"}, command_id="open", using=private_alias)

    def ask(thread):
        for number in range(thread, 200, 4):
            given = {"command_id": f"c{number}", "using": private_alias}
            while True:
                try:
                    outcome = Account.execute("hot", "enlist", {"item": number}, **given)
                    break
                except (
                    *(CommandTimeout, EntityContended, OutcomeUnknown),
                    *(InterfaceError, OperationalError),
                ) as error:
                    lost.append(error)
            code = outcome.rejected and outcome.rejected.code
            told.append(["hot", f"c{number}", outcome.version, outcome.response, code])
        connections.close_all()

    with ThreadPoolExecutor(4) as pool:
        asked = [pool.submit(ask, thread) for thread in range(4)]
        for reached in (40, 120):
            eventually(lambda reached=reached: len(told) >= reached)
            private_database.kill()
            private_database.start()
        for each in asked:
            each.result(timeout=patience(60))
    connections[private_alias].close()
    assert lost
    assert len(told) == 200
    check(private_alias, told)
