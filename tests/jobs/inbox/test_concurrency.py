"""Two deliveries at the same moment: one waits or is retried, and the effects happen once."""

from __future__ import annotations

import sqlite3
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from threading import Barrier, Event
from typing import Any

import pytest
from django.db import OperationalError, connections

from outbox_app import idempotent
from outbox_app.jobs.idempotent import _is_race
from outbox_app.models import InboxEntry
from tests.celery_worker import received
from tests.jobs.inbox.worker import Delivery, deliver, effect
from tests.patience import patience

pytestmark = pytest.mark.django_db(transaction=True)

BLOCKED = {
    "postgresql": "SELECT count(*) FROM pg_stat_activity "
    "WHERE datname = current_database() AND wait_event_type = 'Lock'",
    "mysql": "SELECT count(*) FROM information_schema.innodb_trx t "
    "JOIN information_schema.processlist p ON p.id = t.trx_mysql_thread_id "
    "WHERE p.db = database() AND t.trx_state = 'LOCK WAIT'",
}
REPEATABLE_READ = {
    "postgresql": "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL REPEATABLE READ",
    "mysql": "SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ",
}
IMPATIENCE = {
    "postgresql": "SET lock_timeout = '100ms'",
    "mysql": "SET SESSION innodb_lock_wait_timeout = 1",
    "sqlite": "PRAGMA busy_timeout = 100",
}


@pytest.fixture
def start(alias: str) -> Iterator[Callable[..., Future[Delivery]]]:
    """``start(task, job_id, session={})``: a delivery in a thread, with its own connection."""

    def run(task: Any, job_id: str, session: dict[str, str] | None = None) -> Delivery:
        connection = connections[alias]
        try:
            if statement := (session or {}).get(connection.vendor):
                with connection.cursor() as cursor:
                    cursor.execute(statement)
            return deliver(task, job_id)
        finally:
            connections.close_all()

    with ThreadPoolExecutor(max_workers=10) as pool:
        yield partial(pool.submit, run)


@pytest.fixture
def until_blocked(alias: str) -> Callable[[int], None]:
    """``until_blocked(n)``: return when n sessions wait for a lock. SQLite cannot tell."""

    def wait(number: int) -> None:
        connection = connections[alias]
        if connection.vendor == "sqlite":
            return
        deadline = time.monotonic() + patience()
        with connection.cursor() as cursor:
            while time.monotonic() < deadline:
                cursor.execute(BLOCKED[connection.vendor])
                if cursor.fetchone()[0] == number:
                    return
                time.sleep(0.15)  # InnoDB answers from a cache that is younger than 0.1 s
        raise TimeoutError(f"no {number} sessions wait for a lock")

    return wait


class Slow:
    """``body`` is that of a task: the first execution stops inside, until ``go`` is set."""

    def __init__(self) -> None:
        self.inside, self.go = Event(), Event()
        self.error: Exception | None = None

    def body(self) -> str:
        name = effect("slow")
        if not self.inside.is_set():
            self.inside.set()
            assert self.go.wait(patience())
            if self.error:
                raise self.error
        return name


@pytest.fixture
def slow(start: Callable[..., Any]) -> Iterator[Slow]:  # ends before the threads are awaited
    slow = Slow()
    yield slow
    slow.go.set()


@pytest.mark.parametrize("session", [{}, REPEATABLE_READ], ids=["default", "repeatable read"])
def test_the_second_waits_and_returns_the_first_result(
    alias, app, task, slow, start, until_blocked, effects, session
):
    work = task(idempotent(slow.body))
    first = start(work, "job")
    assert slow.inside.wait(patience())
    second = start(work, "job", session)
    until_blocked(1)
    slow.go.set()

    assert first.result().state == "SUCCESS"
    if session and connections[alias].vendor == "postgresql":
        # Its snapshot is older than what it waited for; only another transaction can see that.
        assert second.result().state == "RETRY"
        [message] = received(app)
        assert message.headers["id"] == "job"
        second = start(work, "job", session)
    assert second.result() == first.result()
    assert effects() == ["slow"]


def test_when_the_first_fails_the_second_executes(task, slow, start, until_blocked, effects, noted):
    slow.error = ZeroDivisionError()
    work = task(idempotent(slow.body))
    first = start(work, "job")
    assert slow.inside.wait(patience())
    second = start(work, "job")
    until_blocked(1)
    slow.go.set()

    assert first.result().state == "FAILURE"
    assert second.result().state == "SUCCESS"
    assert (effects(), noted()) == (["slow"], ["job"])


def test_when_the_first_of_many_fails_one_other_executes(
    task, slow, start, until_blocked, effects, noted
):
    """On MySQL those that waited may deadlock; who loses is retried."""
    slow.error = ZeroDivisionError()
    work = task(idempotent(slow.body))
    first = start(work, "job")
    assert slow.inside.wait(patience())
    others = [start(work, "job") for _ in range(4)]
    until_blocked(4)
    slow.go.set()

    assert first.result().state == "FAILURE"
    states = [other.result().state for other in others]
    assert "SUCCESS" in states
    assert set(states) <= {"SUCCESS", "RETRY"}
    assert len({other.result().value for other in others if other.result().state == "SUCCESS"}) == 1
    assert (effects(), noted()) == (["slow"], ["job"])


def test_of_many_at_once_one_executes(task, start, effects, noted):
    barrier = Barrier(8)

    @task
    @idempotent
    def work():
        return effect("work")

    def together(job_id):
        barrier.wait(patience())
        return deliver(work, job_id)

    with ThreadPoolExecutor(8) as pool:
        for job_id in ("one", "two"):
            deliveries = list(pool.map(closing(together), [job_id] * 8))
            assert {delivery.state for delivery in deliveries} == {"SUCCESS"}
            assert len({delivery.value for delivery in deliveries}) == 1
    assert (effects(), noted()) == (["work", "work"], ["one", "two"])


def test_who_waits_for_too_long_is_retried_and_does_not_fail(
    app, task, slow, start, effects, noted
):
    work = task(max_retries=0)(idempotent(slow.body))
    first = start(work, "job")
    assert slow.inside.wait(patience())
    second = start(work, "job", IMPATIENCE)

    assert second.result().state == "RETRY"
    [message] = received(app)
    assert (message.headers["id"], message.headers["retries"]) == ("job", 1)
    assert message.headers["eta"]
    slow.go.set()
    assert first.result().state == "SUCCESS"
    assert start(work, "job").result() == first.result()
    assert effects() == ["slow"]


def test_who_waits_for_too_long_leaves_other_jobs_their_retries(alias, task, slow, start):
    @task(max_retries=3, autoretry_for=[ZeroDivisionError])
    @idempotent
    def work(fails=False):
        return 1 / 0 if fails else slow.body()

    first = start(work, "job")
    assert slow.inside.wait(patience())
    assert start(work, "job", IMPATIENCE).result().state == "RETRY"
    slow.go.set()
    assert first.result().state == "SUCCESS"
    states = [deliver(work, "other", True, retries=n).state for n in range(4)]
    assert states == ["RETRY"] * 3 + ["FAILURE"]


@pytest.mark.parametrize("code", [sqlite3.SQLITE_BUSY, sqlite3.SQLITE_BUSY_RECOVERY])
def test_every_kind_of_busy_is_a_race(code):
    cause = sqlite3.OperationalError("database is locked")
    cause.sqlite_errorcode = code
    error = OperationalError(*cause.args)
    error.__cause__ = cause

    assert _is_race(error)


def test_an_eager_caller_is_told(alias, task, slow, start, effects):
    """It would have to be retried at once, again and again."""
    work = task(idempotent(slow.body))
    start(work, "job")
    assert slow.inside.wait(patience())
    with connections[alias].cursor() as cursor:
        cursor.execute(IMPATIENCE[connections[alias].vendor])

    with pytest.raises(OperationalError):
        work.apply(task_id="job", throw=True)
    connections[alias].close()


def test_an_error_of_the_task_itself_is_not_taken_for_a_race(app, task, start, noted):
    @task
    @idempotent
    def work():
        raise OperationalError(1213, "Deadlock found when trying to get lock")

    assert start(work, "job").result().state == "FAILURE"
    assert received(app) == []
    assert noted() == []


def test_a_broken_database_is_not_taken_for_a_race(app, task, start, monkeypatch):
    @task
    @idempotent
    def work(): ...

    str(InboxEntry.objects.all().query)  # columns keep the table's name from their first use on
    monkeypatch.setattr(InboxEntry._meta, "db_table", "outbox_missing")

    assert start(work, "job").result().state == "FAILURE"
    assert received(app) == []


def closing(function: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any) -> Any:
        try:
            return function(*args)
        finally:
            connections.close_all()

    return run
