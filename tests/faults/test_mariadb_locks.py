"""MariaDB at REPEATABLE READ, at full load: no session waits for a drainer's locks.

On MariaDB, a relay that holds its rows with ``FOR UPDATE SKIP LOCKED`` blocks INSERTs (1205), and
deadlocks with them (1213).
"""

from __future__ import annotations

import threading
from datetime import timedelta
from types import SimpleNamespace

import pytest
from django.contrib.auth.models import Group
from django.db import connections, transaction
from django.utils import timezone

from outbox_app.database.clock import DatabaseNow
from outbox_app.database.transactions import own_connection
from outbox_app.django_tasks.models import TaskResult
from outbox_app.jobs import staged
from outbox_app.jobs.drain import dead_rows
from outbox_app.models import InboxEntry, StagedJob
from outbox_app.retention.rows import prune
from tests import tasks
from tests.mysql import is_mysql
from tests.patience import patience

from .tools import draining, eventually, on

pytestmark = pytest.mark.django_db(transaction=True)

WRITERS, TRANSACTIONS = 4, 100


@pytest.fixture(params=["repeatable read", "read committed"])
def isolation(alias, request):
    options = connections.settings[alias]["OPTIONS"]
    before = dict(options)
    options["isolation_level"] = request.param
    options["init_command"] += ", innodb_lock_wait_timeout = 1"
    connections[alias].close()
    yield request.param
    connections[alias].close()
    options.clear()
    options.update(before)


@on("mariadb")
def test_no_writer_waits_for_a_drainer(alias, isolation, redis_url, make_app, quick):
    app = make_app(redis_url)
    note = app.task(name="note")(tasks.note)
    groups = [Group.objects.using(alias).create(name=f"{i}") for i in range(WRITERS)]
    errors, done = [], threading.Event()

    def write(number):
        try:
            for i in range(TRANSACTIONS):
                with transaction.atomic(using=alias):
                    Group.objects.using(alias).select_for_update().get(pk=groups[number].pk)
                    for j in range(i % 4):
                        note.apply_async((number, j), ordering_key=f"{i % 10}" if j % 2 else "")
                    if i % 5 == 0:
                        transaction.set_rollback(True, using=alias)
        except BaseException as error:
            errors.append(error)
        finally:
            connections[alias].close()

    def keep_open():
        with transaction.atomic(using=alias):
            note.delay("open", 0)
            staged.set()
            done.wait(patience())
        connections[alias].close()

    staged = threading.Event()
    opened = threading.Thread(target=keep_open, daemon=True)
    opened.start()
    assert staged.wait(patience())
    writers = [threading.Thread(target=write, args=(i,), daemon=True) for i in range(WRITERS)]
    try:
        with draining(alias, batch_size=20) as one, draining(alias, batch_size=20) as other:
            for writer in writers:
                writer.start()
            for writer in writers:
                writer.join(patience())
            # Not for the open transaction either, whose row is among those that are deleted.
            eventually(lambda: not StagedJob.objects.using(alias).exists(), "drained")
            done.set()
            opened.join()
            eventually(lambda: one.tally.published + other.tally.published == expected() + 1)
            assert [one.trouble, other.trouble, errors] == ["", "", []]
    finally:
        done.set()
        opened.join()


def expected():
    return WRITERS * sum(i % 4 for i in range(TRANSACTIONS) if i % 5)


@on("mariadb")
def test_rows_are_deleted_without_a_look_at_others(alias, make_app):
    """By id, also where a scan would be cheaper: it would wait for every open transaction's row."""
    from outbox_app.jobs.drain.batch import delete

    note = make_app().task(name="note")(tasks.note)
    for count in (1, 10, 100, 1500):
        blocker = connections.create_connection(alias)
        with transaction.atomic(using=alias):
            for i in range(count + 2):
                note.delay("", i)
        rows = list(StagedJob.objects.using(alias).order_by("id").values_list("id", "task_id"))
        blocker.set_autocommit(False)
        with blocker.cursor() as cursor:
            for id, _ in (rows[0], rows[-1]):
                cursor.execute("SELECT id FROM outbox_stagedjob WHERE id = %s FOR UPDATE", [id])
        with connections[alias].cursor() as cursor:
            cursor.execute("SET innodb_lock_wait_timeout = 1")
        try:
            delete(rows[1:-1], using=alias)
        finally:
            blocker.close()
        assert StagedJob.objects.using(alias).count() == 2
        StagedJob.objects.using(alias).all().delete()
    connections[alias].close()


def cancel_all(rows, app, last):
    found = staged.cancel_for(rows.all(), until=last.pk, asked=DatabaseNow())
    return found.error or found.done


def bury(rows, app, last):
    row = SimpleNamespace(id=last.pk, task_id=last.task_id, publishes=None)
    return dead_rows.move_to_dead(row, ValueError("x"), using=rows.db)


def cancel(rows, app, last):
    return staged.cancel(last.task_id, using=rows.db, app=app)


def reschedule(rows, app, last):
    return staged.reschedule(last.task_id, eta=timezone.now() + timedelta(hours=9), using=rows.db)


@on("mariadb")
@pytest.mark.parametrize(
    ("decision", "outcome"),
    [
        pytest.param(cancel_all, 2, id="cancel_for"),
        pytest.param(bury, None, id="bury"),
        pytest.param(cancel, False, id="cancel"),
        pytest.param(reschedule, False, id="reschedule"),
    ],
)
def test_a_job_leaves_while_it_is_decided_on(alias, isolation, make_app, decision, outcome):
    """A transaction that had read it would be refused (1020), with all the other jobs."""
    app = make_app()
    note = app.task(name="note")(tasks.note)
    with transaction.atomic(using=alias):
        for n in range(3):
            note.apply_async(("", n), countdown=10_000)
    rows = StagedJob.objects.using(alias)
    last = rows.latest("id")
    if not is_mysql(alias):
        with connections[alias].cursor() as cursor:
            cursor.execute("SET SESSION innodb_snapshot_isolation = 1")  # the default since 11.6

    def leave():
        rows.filter(pk=last.pk)._raw_delete(alias)
        connections[alias].close()

    def before_others(execute, sql, *args):
        if sql.startswith(("DELETE", "UPDATE")) and not drainer.ident:
            drainer.start()
            drainer.join()
        return execute(sql, *args)

    drainer = threading.Thread(target=leave)
    with connections[alias].execute_wrapper(before_others):
        assert decision(rows, app, last) == outcome
    assert drainer.ident


@on("mariadb")
def test_who_cancels_keeps_no_task_of_others_waiting(alias, isolation, make_app):
    """A DELETE that finds no result would lock its place, and with it those of new ones."""
    times = dict.fromkeys(("enqueued_at", "kept_from"), timezone.now())
    with transaction.atomic(using=alias):
        staged.cancel("that-has-left", using=alias, app=make_app())
        with own_connection(alias, seconds=1):
            TaskResult.objects.using(alias).create(task_id="another", status="READY", **times)
    assert TaskResult.objects.using(alias).get().task_id == "another"


@on("mariadb")
def test_the_retention_of_results_waits_for_no_staged_job(alias, isolation, make_app):
    note = make_app().task(name="note")(tasks.note)
    old = timezone.now() - timedelta(days=99)
    results = TaskResult.objects.using(alias)
    results.create(task_id="old", status="READY", enqueued_at=old, kept_from=old)
    with transaction.atomic(using=alias):
        note.delay("", 0)
        with own_connection(alias, seconds=1):
            assert prune("results", alias) == 1


@on("mariadb")
def test_the_retention_of_inbox_ids_waits_for_no_task(alias, isolation):
    """Where half of the rows are old, too: a scan would be cheaper, and meet the task's row."""
    ids = InboxEntry.objects.using(alias)
    for name, days in (("old", 99), ("new", 0)):
        at = timezone.now() - timedelta(days=days)
        ids.bulk_create([InboxEntry(job_id=f"{name}{n}", handled_at=at) for n in range(50)])
    with transaction.atomic(using=alias):
        ids.create(job_id="in flight")
        with own_connection(alias, seconds=1):
            assert prune("inbox", alias) == 50
