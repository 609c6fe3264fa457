"""MySQL as users have it: a replica takes over, a dump is restored, a user has few privileges.

What each test of MySQL runs on anyway, see ``tests.servers.mysql``: GTIDs, a binary log by rows,
``sql_require_primary_key``, no ``performance_schema``.
"""

from __future__ import annotations

import threading
from contextlib import suppress

import pytest
from django.core.management import call_command
from django.db import Error, connections, transaction

from outbox_app import stage
from outbox_app.checks.databases import check_databases
from outbox_app.entities.verification import differences
from outbox_app.events import publish, subscriber
from outbox_app.events.models import Event
from outbox_app.events.subscriptions.runner import Runner
from outbox_app.events.subscriptions.subscriber import subscriber_named
from outbox_app.failpoints import set_failpoint
from outbox_app.models import StagedJob
from tests import tasks
from tests.entities.models import Account
from tests.patience import eventually, patience
from tests.servers.mysql import MySQL, Replica

from .tools import Book, drain, draining, on, outbox_on

pytestmark = on("mysql")


def ask(alias, sql):
    with connections[alias].cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchone()


def move(alias, server):
    """Let the alias name another server: as a proxy, or a name, does at a fail-over."""
    connections.settings[alias]["PORT"] = str(server.port)
    connections[alias].close()


def handled(alias):
    """The events whose effects are committed; a second handling would be an IntegrityError."""
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT event FROM handled")
        return sorted(event for (event,) in cursor.fetchall())


def stored(alias):
    return sorted(Event.objects.using(alias).values_list("pk", flat=True))


@pytest.fixture
def reads():
    @subscriber("reads", start="beginning")
    def handle(events):
        for event in events:
            with connections[subscriber_named("reads").using].cursor() as cursor:
                cursor.execute("INSERT INTO handled VALUES (%s)", [event.id])

    return subscriber_named("reads")


@pytest.fixture
def in_the_middle():
    """``in_the_middle(alias, more_than=5)``: a batch stops before its commit, and goes on.

    It is the first one that is not among the first events. Returns the events of both.
    """

    def make(using, *, more_than):
        reached, goes_on = threading.Event(), threading.Event()

        def wait():
            if len(handled(using)) > more_than:
                reached.set()
                goes_on.wait(patience())

        set_failpoint("handled", wait)
        return reached, goes_on

    yield make
    set_failpoint("handled", None)


@pytest.mark.slow
def test_a_replica_takes_over(
    alias, django_db_blocker, settings, make_app, redis_url, reads, in_the_middle
):
    """In the middle of a drain and of a subscription, after transactions that were rolled back."""
    app = make_app(redis_url)
    app.task(name="note")(tasks.note)
    with (
        MySQL() as primary,
        Replica(primary) as replica,
        outbox_on(primary.url, django_db_blocker, settings) as using,
    ):
        ask(using, "CREATE TABLE handled (event bigint PRIMARY KEY)")
        book = Book(using=using)
        for n in range(60):
            book.stage(app, 3, key=f"{n % 5}")
            with transaction.atomic(using=using):
                publish(f"s-{n % 7}", "made", using=using)
                publish(f"s-{n}", "made", using=using)
        with transaction.atomic(using=using):  # the replica has never heard of these positions
            for _ in range(20):
                publish("gone", "made", using=using)
            transaction.set_rollback(True, using=using)
        [gtids] = ask(using, "SELECT @@gtid_executed")
        runner = Runner([reads], interval=0.02, lease_seconds=2.0, batch_size=5)
        thread = threading.Thread(target=runner.run, daemon=True)
        in_a_batch, has_moved = in_the_middle(using, more_than=5)
        thread.start()
        try:
            with draining(using, batch_size=5, interval=0.05):
                assert in_a_batch.wait(patience())
                move(using, replica)
                ask(using, f"SELECT WAIT_FOR_EXECUTED_GTID_SET('{gtids}', 60)")
                primary.kill()
                replica.promote()
                has_moved.set()
                eventually(lambda: not StagedJob.objects.using(using).exists(), "drained")
                with transaction.atomic(using=using):
                    publish("after", "made", using=using)
                book.stage(app, 3)
                eventually(lambda: handled(using) == stored(using), "handled")
                eventually(lambda: not StagedJob.objects.using(using).exists(), "drained")
        finally:
            has_moved.set()
            runner.stop()
            thread.join(patience())
        assert len(stored(using)) == 121
        assert set(book.jobs) <= set(book.receive(app))


@pytest.mark.slow
def test_a_dump_is_restored_beside_a_running_subscription(
    alias, django_db_blocker, settings, make_app, reads, in_the_middle
):
    """The dump is of one moment: the cursor in it stands before what is not in it."""
    make_app().task(name="note")(tasks.note)
    with MySQL() as server, outbox_on(server.url, django_db_blocker, settings) as using:
        ask(using, "CREATE TABLE handled (event bigint PRIMARY KEY)")
        ended = threading.Event()

        def write():
            try:
                n = 0
                while not ended.is_set():
                    n += 1
                    with transaction.atomic(using=using):
                        publish(f"s-{n % 7}", "made", using=using)
                        publish(f"s-{n}", "made", using=using)
                        transaction.set_rollback(n % 3 == 0, using=using)
            finally:
                connections[using].close()

        runner = Runner([reads], interval=0.02, lease_seconds=2.0, batch_size=5)
        threads = [threading.Thread(target=each, daemon=True) for each in (runner.run, write)]
        in_a_batch, is_dumped = in_the_middle(using, more_than=20)
        for thread in threads:
            thread.start()
        try:
            assert in_a_batch.wait(patience())
            server.restore(server.dump("outbox"), "copy")
            is_dumped.set()
            before = len(handled(using))
            eventually(lambda: len(handled(using)) > before, "goes on")
        finally:
            ended.set()
            is_dumped.set()
            eventually(lambda: handled(using) == stored(using), "all handled")
            runner.stop()
            for thread in threads:
                thread.join(patience())
        connections.settings[using]["NAME"] = "copy"
        connections[using].close()
        assert handled(using) != stored(using)
        with transaction.atomic(using=using):
            publish("after", "made", using=using)

        def is_level():
            Runner([reads]).run(once=True)
            return handled(using) == stored(using)

        eventually(is_level, "positions of transactions that the dump has not settle first")


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("level", ["READ-COMMITTED", "REPEATABLE-READ"])
@pytest.mark.parametrize("mode", ["ANSI_QUOTES", "TRADITIONAL,ONLY_FULL_GROUP_BY"])
def test_a_user_who_may_only_change_rows(alias, level, mode, settings, make_app, reads):
    """No PROCESS; and quotes that stand for names."""
    app = make_app()
    app.task(name="note")(tasks.note)
    connection, name = connections[alias], "outbox_rows_only"
    database = connection.settings_dict["NAME"]
    ask(alias, "CREATE TABLE handled (event bigint PRIMARY KEY)")
    ask(alias, f"CREATE USER {name}@'%%' IDENTIFIED BY 'x'")
    ask(alias, f"GRANT SELECT, INSERT, UPDATE, DELETE ON {database}.* TO {name}@'%%'")
    before = dict(connections.settings[alias])
    try:
        connection.close()
        options = before["OPTIONS"] | {
            "init_command": f"SET sql_mode = '{mode},STRICT_TRANS_TABLES'",
            "isolation_level": level.replace("-", " ").lower(),
        }
        connections.settings[alias].update(USER=name, PASSWORD="x", OPTIONS=options)
        assert ask(alias, "SELECT @@transaction_isolation") == (level,)
        assert check_databases(databases=[alias]) == []
        with transaction.atomic(using=alias):
            for n in range(5):
                stage("note", ("", n), using=alias, app=app, ordering_key=f"{n % 2}")
                publish("s", "made", {"quoted": "'\\\""}, using=alias)
        Account.execute("a", "open", {"owner": "A"}, command_id="1", using=alias)
        assert drain(alias).published == 5
        assert Runner([reads]).run(once=True) >= 5
        assert len(handled(alias)) == len(stored(alias))
        assert not list(differences(Account, using=alias))
        call_command("outbox_prune", "--inbox", "--incidents", "--counters", database=alias)
        with suppress(SystemExit):  # no drainer runs
            call_command("outbox_status", database=alias)
    finally:
        connections[alias].close()
        connections.settings[alias].update(before)
        ask(alias, f"DROP USER {name}@'%%'")
        ask(alias, "DROP TABLE handled")


@pytest.mark.slow
@pytest.mark.parametrize("mode", [0, 1, 2])
def test_each_way_of_giving_out_ids(alias, mode, django_db_blocker, settings, make_app, reads):
    """Beside writers of an unknown number of rows, which hold a lock on the table in 0 and 1."""
    with (
        MySQL(extra_arguments=(f"--innodb-autoinc-lock-mode={mode}",)) as server,
        outbox_on(server.url, django_db_blocker, settings) as using,
    ):
        ask(using, "CREATE TABLE handled (event bigint PRIMARY KEY)")
        errors = []

        def write(writer):
            try:
                for n in range(20):
                    with transaction.atomic(using=using):
                        for m in range(4):
                            publish(f"s-{writer}-{m}", "made", using=using)
                        if writer % 2:
                            ask(using, COPIED)
                        transaction.set_rollback(n % 5 == 0, using=using)
            except Error as error:
                errors.append(error)
            finally:
                connections[using].close()

        threads = [threading.Thread(target=write, args=(n,), daemon=True) for n in range(6)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            Runner([reads]).run(once=True)
        Runner([reads]).run(once=True)
        assert errors == []
        assert handled(using) == stored(using)


COPIED = (
    "INSERT INTO outbox_event (topic, stream, version, type, data, metadata, slice, message_id) "
    "SELECT '', UUID(), 1, 'copied', '{}', '{}', 0, REPLACE(UUID(), '-', '') FROM "
    "(SELECT 1 FROM information_schema.collations LIMIT 9) AS some"
)
