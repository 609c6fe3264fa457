"""A worker's handling of a message: states, errors, attempts, and repeated deliveries."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Empty
from typing import Any
from unittest.mock import patch

import pytest
from celery.exceptions import (
    SoftTimeLimitExceeded,
    WorkerLostError,
    WorkerShutdown,
    WorkerTerminate,
)
from django.contrib.auth.models import Group
from django.db import OperationalError, connections, transaction
from kombu import Producer

from outbox_app.django_tasks.models import TaskResult
from outbox_app.exceptions import CallbackFailed
from outbox_app.failpoints import set_failpoint
from outbox_app.models import StagedJob
from outbox_app.testing import run_staged
from tests.django_tasks import declared
from tests.django_tasks.declared import GreenletExit, add, signals
from tests.emptying import cut_off
from tests.faults.tools import on

pytestmark = [pytest.mark.usefixtures("backend"), pytest.mark.django_db(transaction=True)]


@pytest.fixture
def enqueue(alias: str) -> Callable[..., Any]:
    """``enqueue(task, …)``: commit a call; its job is deleted, as after the drain."""

    def enqueue(task: Any, *args: Any) -> Any:
        with transaction.atomic(using=alias):
            result = task.enqueue(*args)
        StagedJob.objects.using(alias).all().delete()
        return result

    return enqueue


@pytest.fixture
def heard() -> Iterator[list[tuple[str, str]]]:
    """The signals that were sent, each with the status at that time."""
    names = ("task_started", "task_finished")
    heard: list[tuple[str, str]] = []
    receivers = {
        name: lambda task_result, name=name, **_: heard.append((name, str(task_result.status)))
        for name in names
    }
    for name, hear in receivers.items():
        getattr(signals, name).connect(hear)
    yield heard
    for name, hear in receivers.items():
        getattr(signals, name).disconnect(hear)


@pytest.mark.parametrize("task", [add, declared.add_async], ids=["function", "coroutine"])
def test_a_result(alias: str, enqueue: Any, run: Any, task: Any) -> None:
    result = enqueue(task, [1], [2])
    assert run(result).state == "SUCCESS"
    result.refresh()
    assert (result.status, result.return_value) == ("SUCCESSFUL", [1, 2])
    assert result.enqueued_at <= result.started_at == result.last_attempted_at
    assert result.started_at <= result.finished_at
    assert TaskResult.objects.using(alias).get().kept_from == result.finished_at
    assert result.attempts == 1
    assert result.worker_ids[0].startswith("worker@here:")


def test_a_callback_that_fails_after_the_commit(alias: str, enqueue: Any, run: Any) -> None:
    """The effects stay, and the result says what was lost."""
    result = enqueue(declared.effect_and_callback, "paid")
    assert run(result).state == "FAILURE"
    result.refresh()
    [error] = result.errors
    assert (result.status, error.exception_class) == ("FAILED", CallbackFailed)
    assert "tests.django_tasks.declared.away" in error.traceback
    assert "the mail server is away" in error.traceback
    assert Group.objects.using(alias).count() == 1
    # As if the worker had died before it recorded the result.
    TaskResult.objects.using(alias).update(status="RUNNING", finished_at=None)
    assert isinstance(run(result).value, CallbackFailed)
    result.refresh()
    assert result.status == "FAILED"
    assert Group.objects.using(alias).count() == 1


class Elsewhere:
    """A router that has no word on results, as OUTBOX["DATABASE"] says where they are."""

    def db_for_write(self, model: Any, **hints: Any) -> str:
        return "elsewhere"


def test_a_project_whose_routers_name_another_database(
    enqueue: Any, run: Any, settings: Any
) -> None:
    settings.DATABASE_ROUTERS = [Elsewhere()]
    result = enqueue(add, [1], [2])
    assert run(result).state == "SUCCESS"
    result.refresh()
    assert (result.status, result.return_value) == ("SUCCESSFUL", [1, 2])


def test_the_context(alias: str, enqueue: Any, run: Any) -> None:
    result = enqueue(declared.attempt)
    TaskResult.objects.using(alias).update(worker_ids=json.dumps(["died"]))
    run(result)
    result.refresh()
    assert result.return_value == [2, result.id, "RUNNING"]


@pytest.mark.parametrize(
    ("task", "argument", "error", "celery"),
    [
        (declared.fail, "no stock", ValueError, "FAILURE"),
        (declared.fail, "\x00\ud800", ValueError, "FAILURE"),
        (declared.fail_empty, None, declared.Empty, "FAILURE"),
        (declared.leave, 3, SystemExit, "SUCCESS"),
        (declared.leave, -1, SystemExit, "SUCCESS"),
        (declared.returns_no_json, None, TypeError, "FAILURE"),
    ],
    ids=["raises", "text", "empty", "exits", "exits by -1", "no JSON"],
)
def test_an_error(
    *,
    alias: str,
    enqueue: Any,
    run: Any,
    task: Any,
    argument: Any,
    error: Any,
    celery: str,
    caplog: Any,
) -> None:
    # They log the text as it is, and a report with a lone surrogate ends its worker.
    for name in ("celery.app.trace", "django.tasks", "django_tasks"):
        caplog.set_level("CRITICAL", name)
    result = enqueue(task, *([] if argument is None else [argument]))
    assert run(result).state == celery
    result.refresh()
    assert (result.status, result.is_finished) == ("FAILED", True)
    with pytest.raises(ValueError, match="Task failed"):
        result.return_value  # noqa: B018
    assert [each.exception_class for each in result.errors] == [error]
    assert result.errors[0].traceback.startswith("Traceback")
    result.errors[0].traceback.encode()  # that can be written


def test_a_return_value_that_is_too_large(
    alias: str, enqueue: Any, run: Any, settings: Any
) -> None:
    result = enqueue(declared.large, 5000)
    settings.OUTBOX = {**settings.OUTBOX, "MAX_MESSAGE_BYTES": 4000}
    assert run(result).state == "FAILURE"
    result.refresh()
    assert "at most 4000" in result.errors[0].traceback
    assert TaskResult.objects.using(alias).get().return_value == "null"


def test_the_signals(alias: str, enqueue: Any, run: Any, heard: list[Any]) -> None:
    run(enqueue(add, 1))
    run(enqueue(declared.fail))
    begun = ("task_started", "RUNNING")
    assert heard == [
        begun,
        ("task_finished", "SUCCESSFUL"),
        begun,
        ("task_finished", "FAILED"),
    ]


@pytest.mark.parametrize("task", [declared.effect, declared.fail], ids=["successful", "failed"])
def test_a_second_delivery_does_nothing(
    alias: str, enqueue: Any, run: Any, heard: list[Any], task: Any
) -> None:
    result = enqueue(task, "once")
    run(result)
    result.refresh()
    first, signals_of_first = result.status, list(heard)
    assert run(result).state == "SUCCESS"
    again = task.get_result(result.id)
    assert (again, again.attempts, again.status) == (result, 1, first)
    assert Group.objects.using(alias).count() == (first == "SUCCESSFUL")
    assert heard == signals_of_first


def test_the_first_attempt_that_ends_decides(
    alias: str, enqueue: Any, run: Any, heard: list[Any]
) -> None:
    """A second one begins while the first runs, and ends before it."""
    result = enqueue(add, 1, 2)

    def overtake() -> None:
        set_failpoint("task_ran", None)
        run(result)
        heard.append(("overtaken", ""))

    set_failpoint("task_ran", overtake)
    try:
        run(result)
    finally:
        set_failpoint("task_ran", None)
    result.refresh()
    assert (result.status, result.attempts) == ("SUCCESSFUL", 2)
    assert heard[-1] == ("overtaken", "")


@pytest.mark.parametrize("code", [KeyboardInterrupt, -241], ids=["interrupted", "terminated"])
def test_a_worker_that_is_stopped_leaves_it_running(
    alias: str, enqueue: Any, run: Any, code: Any
) -> None:
    result = enqueue(declared.interrupt) if code is KeyboardInterrupt else None
    result = result or enqueue(declared.leave, code)
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run(result)
    result.refresh()
    assert (result.status, result.errors, result.attempts) == ("RUNNING", [], 1)
    began = result.started_at
    with pytest.raises((KeyboardInterrupt, SystemExit)):
        run(result)
    result.refresh()
    assert result.started_at == began < result.last_attempted_at


def test_what_is_cancelled_is_not_run(alias: str, enqueue: Any, run: Any) -> None:
    result = enqueue(declared.effect, "never")
    TaskResult.objects.using(alias).all().delete()
    assert run(result).state == "SUCCESS"
    assert not Group.objects.using(alias).exists()


def test_a_task_that_a_worker_does_not_have(alias: str, enqueue: Any, run: Any) -> None:
    result = enqueue(add, 1)
    rows = TaskResult.objects.using(alias)
    rows.update(task="tests.django_tasks.declared.gone")
    assert run(result).state == "FAILURE"
    assert "does not define" in rows.get().errors


def test_a_queue_that_is_gone_from_the_settings(
    alias: str, enqueue: Any, run: Any, settings: Any
) -> None:
    result = enqueue(add.using(queue_name="mails"), 1, 2)
    settings.TASKS = {"default": {"BACKEND": "outbox_app.django_tasks.OutboxBackend"}}
    run(result)
    assert add.get_result(result.id).return_value == 3


def test_a_backend_that_is_gone_from_the_settings(
    alias: str, enqueue: Any, run: Any, settings: Any
) -> None:
    settings.TASKS = {**settings.TASKS, "mail": settings.TASKS["default"]}
    result = enqueue(add.using(backend="mail"), 1, 2)
    settings.TASKS = {"default": settings.TASKS["default"]}
    assert run(result).state == "SUCCESS"
    assert add.get_result(result.id).return_value == 3


@pytest.mark.parametrize("when", ["begins", "ends"])
def test_a_database_that_is_away_puts_it_off(
    alias: str, enqueue: Any, run: Any, when: str, app: Any
) -> None:
    result = enqueue(add, 1, 2)

    def away(execute: Any, sql: str, *rest: Any) -> Any:
        if ("finished_at" in sql and "UPDATE" in sql) if when == "ends" else True:
            raise OperationalError("away")
        return execute(sql, *rest)

    with statements_go_through(away, from_its=when):
        assert run(result).state == "RETRY"
    with app.connection_for_read() as connection:
        queue = connection.SimpleQueue(app.conf.task_default_queue)
        assert queue.get_nowait().headers["id"] == result.id
        queue.close()
    assert run(result, retries=1).state == "SUCCESS"
    result.refresh()
    assert result.return_value == 3


def test_a_database_and_a_broker_that_are_away_leave_the_message_where_it_is(
    alias: str, enqueue: Any, run: Any
) -> None:
    result = enqueue(add, 1, 2)

    def away(*_: Any) -> Any:
        raise OperationalError("away")

    broken = patch.object(Producer, "publish", side_effect=ConnectionError)
    with statements_go_through(away, from_its="begins"), broken:
        delivery = run(result)
    assert delivery.state == "REJECTED"
    assert delivery.value.requeue


def test_eagerly_an_error_of_the_database_is_the_callers(alias: str, app: Any) -> None:
    """Its connection stays open: the caller may go on in the transaction around a savepoint."""
    app.conf.update(task_always_eager=True, task_eager_propagates=True)

    def refuse(execute: Any, sql: str, *rest: Any) -> Any:
        if "finished_at" in sql and "UPDATE" in sql:
            raise OperationalError("locked")
        return execute(sql, *rest)

    with statements_go_through(refuse), transaction.atomic(using=alias):
        with pytest.raises(OperationalError, match="locked"), transaction.atomic(using=alias):
            add.enqueue(1, 2)
        Group.objects.using(alias).create(name="kept")
    assert Group.objects.using(alias).filter(name="kept").exists()


def wrappers() -> list[Any]:
    from outbox_app.aliases import outbox_alias

    return connections[outbox_alias()].execute_wrappers


@contextmanager
def statements_go_through(wrapper: Any, *, from_its: str = "ends") -> Iterator[None]:
    """Let statements go through a wrapper from the moment at which the task begins, or ends."""
    if from_its == "ends":
        set_failpoint("task_ran", lambda: wrappers().append(wrapper))
    else:
        wrappers().append(wrapper)
    try:
        yield
    finally:
        set_failpoint("task_ran", None)
        wrappers().clear()


def test_a_connection_that_died_while_the_task_ran(alias: str, enqueue: Any, run: Any) -> None:
    result = enqueue(declared.effect, "once")

    def cut(execute: Any, *rest: Any) -> Any:
        wrappers().clear()
        raise OperationalError("gone away")

    with statements_go_through(cut):
        assert run(result).state == "SUCCESS"
    result.refresh()
    assert (result.status, result.attempts) == ("SUCCESSFUL", 1)


@pytest.mark.parametrize(
    "task", [declared.effect_once, declared.effect_once_async], ids=["function", "coroutine"]
)
def test_an_idempotent_task_has_its_effect_once(
    alias: str, enqueue: Any, run: Any, task: Any
) -> None:
    """The worker dies between the effect and the result, and is given the message again."""
    result = enqueue(task, "once")

    def die() -> None:
        set_failpoint("task_ran", None)
        raise KeyboardInterrupt

    set_failpoint("task_ran", die)
    with pytest.raises(KeyboardInterrupt):
        run(result)
    assert task.get_result(result.id).status == "RUNNING"
    run(result)
    result.refresh()
    assert result.attempts == 2
    assert [result.return_value] == [each.name for each in Group.objects.using(alias).all()]


def test_a_task_that_ends_its_worker_each_time_has_failed(
    alias: str, enqueue: Any, run: Any, heard: list[Any]
) -> None:
    result = enqueue(declared.effect, "never")
    TaskResult.objects.using(alias).update(worker_ids=json.dumps(["died"] * 10))
    assert run(result).state == "FAILURE"
    result.refresh()
    assert (result.status, result.errors[0].exception_class) == ("FAILED", WorkerLostError)
    assert not Group.objects.using(alias).exists()
    assert heard == [("task_finished", "FAILED")]


def test_long_words_of_an_error_are_cut(alias: str, enqueue: Any, run: Any) -> None:
    result = enqueue(declared.fail, "x" * 200_000 + "last words")
    run(result)
    result.refresh()
    assert len(result.errors[0].traceback) == 100_000
    assert result.errors[0].traceback.endswith("last words\n")


def test_what_is_staged_in_a_test_is_run_there(alias: str) -> None:
    with transaction.atomic(using=alias):
        result = add.enqueue(1, 2)
        failed = declared.fail.enqueue()
    with pytest.raises(ValueError, match="no stock"):
        run_staged()
    run_staged()
    for each in (result, failed):
        each.refresh()
    assert (result.return_value, failed.status) == (3, "FAILED")


def test_an_attempt_that_only_waits_for_another_delivery_does_not_count(
    alias: str, enqueue: Any, run: Any
) -> None:
    result = enqueue(declared.effect_once, "once")

    def locked(execute: Any, sql: str, *rest: Any) -> Any:
        if "outbox_inbox" in sql:
            raise OperationalError(1205, "Lock wait timeout exceeded; database is locked")
        return execute(sql, *rest)

    wrappers().append(locked)
    try:
        with patch("outbox_app.jobs.idempotent._is_race", lambda error: True):
            for retries in range(12):
                assert run(result, retries=retries).state == "RETRY"
    finally:
        wrappers().clear()
    result.refresh()
    assert (result.status, result.attempts) == ("RUNNING", 0)
    assert run(result).state == "SUCCESS"
    result.refresh()
    assert (result.status, result.attempts) == ("SUCCESSFUL", 1)


@pytest.mark.parametrize("when", ["begins", "ends"])
def test_a_time_limit_while_the_database_does_not_answer(
    alias: str, enqueue: Any, run: Any, when: str
) -> None:
    """What has not begun is put off; what has ended is recorded."""
    result = enqueue(declared.effect, "once")

    def hang(execute: Any, *rest: Any) -> Any:
        wrappers().clear()
        raise SoftTimeLimitExceeded

    with statements_go_through(hang, from_its=when):
        assert run(result).state == ("SUCCESS" if when == "ends" else "RETRY")
    if when == "begins":
        assert run(result, retries=1).state == "SUCCESS"
    result.refresh()
    assert (result.status, result.attempts) == ("SUCCESSFUL", 1)
    assert Group.objects.using(alias).count() == 1


def test_a_result_whose_update_lost_its_answer(
    alias: str, enqueue: Any, run: Any, heard: list[Any], caplog: Any
) -> None:
    result = enqueue(add, 1, 2)

    def lose(execute: Any, sql: str, *rest: Any) -> Any:
        wrappers().clear()
        execute(sql, *rest)
        raise OperationalError("gone away")

    with statements_go_through(lose):
        assert run(result).state == "SUCCESS"
    assert heard == [("task_started", "RUNNING"), ("task_finished", "SUCCESSFUL")]
    assert "Another attempt" not in caplog.text


@on("postgres", "mariadb")
def test_a_connection_that_is_kept_although_it_is_dead(alias: str, enqueue: Any, run: Any) -> None:
    """As by Celery with CELERY_DB_REUSE_MAX, which looks at none for so many tasks."""
    result = enqueue(add, 1, 2)
    cut_off(alias)
    assert run(result).state == "RETRY"
    assert run(result, retries=1).state == "SUCCESS"


def test_a_retry_that_was_sent_is_sent_once(alias: str, enqueue: Any, run: Any, app: Any) -> None:
    result = enqueue(declared.effect_once, "once")

    noted: list[str] = []

    def away(execute: Any, sql: str, *rest: Any) -> Any:
        noted.extend([sql] if "outbox_inbox" in sql else [])
        if noted:
            raise OperationalError(1205, "Lock wait timeout exceeded; database is locked")
        return execute(sql, *rest)

    race = patch("outbox_app.jobs.idempotent._is_race", lambda error: True)
    with statements_go_through(away, from_its="begins"), race:
        assert run(result).state == "RETRY"
    with app.connection_for_read() as connection:
        queue = connection.SimpleQueue(app.conf.task_default_queue)
        queue.get_nowait().ack()
        with pytest.raises(Empty):
            queue.get_nowait()
        queue.close()


@pytest.mark.parametrize("ended", [WorkerShutdown, WorkerTerminate, GreenletExit])
def test_a_worker_that_ends_itself_leaves_it_running(
    alias: str, enqueue: Any, run: Any, ended: Any
) -> None:
    """As by a second Ctrl-C, in a pool whose tasks are threads or greenlets of one process."""
    result = enqueue(declared.end, ended.__name__)
    with pytest.raises(ended):
        run(result)
    result.refresh()
    assert (result.status, result.errors, result.attempts) == ("RUNNING", [], 1)
