"""A worker looks after a task: at most once a minute, and only where that costs next to nothing."""

from __future__ import annotations

import threading
from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import OperationalError, connections, transaction
from django.test.utils import CaptureQueriesContext

from outbox_app import stage
from outbox_app.database.clock import DatabaseNow
from outbox_app.models import InboxEntry, Process, StagedJob
from outbox_app.monitoring import no_drainer
from tests import tasks
from tests.faults.tools import on
from tests.patience import SECONDS
from tests.servers.mysql import MARIADB

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def not_looked_yet(monkeypatch):
    monkeypatch.setattr(no_drainer, "_last_look", bytearray(8))


@pytest.fixture
def task(make_app):
    return make_app().task(name="add", shared=False)(tasks.add)


@pytest.fixture
def after(alias, task, caplog):
    """``after(reads)``: how often the worker says that a drainer is missing, after a task."""

    def after(reads=None):
        caplog.clear()
        with CaptureQueriesContext(connections[alias]) as captured:
            no_drainer.look(sender=task)
        sent = [query["sql"] for query in captured]
        # Besides, the look bounds how long it waits for a lock.
        assert reads in (None, sum("SELECT" in sql for sql in sent))
        assert reads != 0 or not sent
        return [record.getMessage() for record in caplog.records]

    return after


@pytest.fixture
def waiting(alias, task):
    """``waiting(seconds, **columns)``: a job has been ready for that time."""

    def waiting(seconds, **columns):
        with transaction.atomic(using=alias):
            stage(task, (1, 1), using=alias)
        since = DatabaseNow() - timedelta(seconds=seconds)
        StagedJob.objects.using(alias).update(**{"staged_at": since, **columns})

    return waiting


def drainer(alias, silent=0):
    beat = DatabaseNow() - timedelta(seconds=silent)
    Process.objects.using(alias).create(
        id=uuid4(), host="h", pid=1, lease_seconds=10, heartbeat_at=beat
    )


def test_jobs_wait_and_no_drainer_lives(alias, after, waiting, monkeypatch):
    waiting(45)
    drainer(alias, silent=60)
    [line] = after()
    assert line.startswith(f"No drainer runs, and jobs wait database={alias} seconds=4")
    assert line.endswith('start="manage.py drain_outbox"')
    assert after(reads=0) == []
    monkeypatch.setattr(no_drainer, "PAUSE", 0)
    assert len(after()) == 1


def test_a_drainer_lives(alias, after, waiting):
    """The one query that a worker makes in a minute."""
    waiting(45)
    drainer(alias)
    assert after(reads=1) == []
    assert after(reads=0) == []


def test_no_job_waits_long(alias, after, waiting):
    waiting(15)
    assert after() == []


def test_held_jobs_wait_from_their_time_on(alias, after, waiting, monkeypatch):
    monkeypatch.setattr(no_drainer, "PAUSE", 0)
    waiting(900, available_at=DatabaseNow() + timedelta(seconds=5))
    assert after() == []
    StagedJob.objects.using(alias).update(available_at=DatabaseNow() - timedelta(seconds=15))
    assert after() == []
    StagedJob.objects.using(alias).update(available_at=DatabaseNow() - timedelta(seconds=45))
    assert len(after()) == 1


class TestWithoutQueries:
    """What must not look leaves the turn to a task that can."""

    @pytest.fixture(autouse=True)
    def job(self, waiting):
        waiting(45)

    @pytest.fixture
    def alias(self, settings):
        settings.OUTBOX = {**settings.OUTBOX, "DATABASE": "default"}
        return "default"

    def test_in_a_transaction(self, alias, after):
        with transaction.atomic(using=alias):
            assert after(reads=0) == []
        assert len(after()) == 1

    def test_without_a_connection(self, alias, after, task):
        connections[alias].close()
        no_drainer.look(sender=task)
        assert connections[alias].connection is None
        connections[alias].ensure_connection()
        assert len(after()) == 1

    def test_for_an_eager_task(self, after, task):
        task.push_request(is_eager=True)
        assert after(reads=0) == []
        task.pop_request()
        assert len(after()) == 1

    def test_a_database_that_answers_with_an_error_fails_no_task(self, alias, after):
        def fail(*args):
            raise OperationalError("gone")

        with connections[alias].execute_wrapper(fail):
            assert after() == []


@pytest.fixture
def manual(alias):
    """Autocommit is off, by the setting AUTOCOMMIT or by set_autocommit()."""
    connection = connections[alias]
    connection.ensure_connection()
    connection.set_autocommit(False)
    yield connection
    connection.rollback()
    connection.close()


@on("postgres", "mariadb")  # the tests' SQLite is in memory
def test_in_a_transaction_without_atomic(alias, task, manual):
    StagedJob.objects.using(alias).count()  # the task's transaction is open
    with CaptureQueriesContext(manual) as captured:
        no_drainer.look(sender=task)
    assert len(captured) == 0


@on("postgres", "mariadb")
def test_no_snapshot_is_left(alias, task, manual):
    """The next task of the process reads what was committed before it began."""
    if alias == MARIADB:
        with manual.cursor() as cursor:
            cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    manual.commit()  # the end of the task
    no_drainer.look(sender=task)

    def other():
        try:
            InboxEntry.objects.using(alias).create(job_id="x", task="t")
        finally:
            connections[alias].close()

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert InboxEntry.objects.using(alias).count() == 1


@on("postgres")
def test_a_locked_table_holds_up_no_task(alias, task, monkeypatch):
    monkeypatch.setattr(no_drainer, "LOCK_SECONDS", 0.1)
    connections[alias].ensure_connection()
    release, locked = threading.Event(), threading.Event()

    def migrate():
        with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
            cursor.execute(f"LOCK TABLE {Process._meta.db_table} IN ACCESS EXCLUSIVE MODE")
            locked.set()
            release.wait(SECONDS)
        connections[alias].close()

    thread = threading.Thread(target=migrate)
    thread.start()
    assert locked.wait(SECONDS)
    no_drainer.look(sender=task)  # returns while the table is locked
    assert thread.is_alive()
    release.set()
    thread.join()
