"""``enqueue()``: the job and its result commit together or not at all; calls that are refused."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timedelta
from typing import Any

import pytest
from asgiref.sync import async_to_sync
from django.db import IntegrityError, OperationalError, connections, transaction
from django.utils import timezone

from outbox_app.django_tasks.models import RUN_TASK, TaskResult
from outbox_app.exceptions import InvalidJob, NotAtomic
from outbox_app.jobs.dead import requeue_dead
from outbox_app.jobs.message import Message
from outbox_app.jobs.staged import cancel
from outbox_app.models import DeadJob, StagedJob
from outbox_app.testing import assert_staged
from tests.django_tasks import declared
from tests.django_tasks.declared import add, add_async, exceptions, signals

pytestmark = pytest.mark.usefixtures("backend")


def rows(alias: str) -> tuple[list[str], list[str]]:
    """The ids of the jobs and of the results."""
    staged = StagedJob.objects.using(alias).values_list("task_id", flat=True)
    return list(staged), list(TaskResult.objects.using(alias).values_list("task_id", flat=True))


def message(alias: str) -> tuple[StagedJob, Message]:
    job = StagedJob.objects.using(alias).get()
    return job, Message.loads(job.envelope)


@pytest.mark.usefixtures("in_atomic")
def test_the_job_and_its_result_are_staged(alias: str) -> None:
    result = add.enqueue(1, y=2)
    assert rows(alias) == ([result.id], [result.id])
    assert (result.status, result.args, result.kwargs) == ("READY", [1], {"y": 2})
    assert result.enqueued_at is not None
    assert (result.is_finished, result.attempts) == (False, 0)
    assert (result.task, result.backend) == (add, "default")


@pytest.mark.django_db(transaction=True)
def test_a_rollback_takes_both(alias: str) -> None:
    with transaction.atomic(using=alias):
        with suppress(ZeroDivisionError), transaction.atomic(using=alias):
            inner = add.enqueue(1)
            raise ZeroDivisionError
        kept = add.enqueue(2)
    assert rows(alias) == ([kept.id], [kept.id])
    with pytest.raises(exceptions.TaskResultDoesNotExist):
        add.get_result(inner.id)


@pytest.mark.usefixtures("in_atomic")
def test_a_coroutine_stages_as_well(alias: str) -> None:
    result = async_to_sync(add_async.aenqueue)(1, 2)
    assert rows(alias) == ([result.id], [result.id])
    assert async_to_sync(add_async.aget_result)(result.id) == result


@pytest.mark.usefixtures("in_atomic")
def test_a_result_is_found_as_it_was_enqueued(alias: str) -> None:
    task = add.using(priority=7, queue_name="mails")
    result = task.enqueue({"a": [1, None, "\x00\ud800", float("inf")]}, y=True)
    found = add.get_result(result.id)
    assert (found, found.task) == (result, task)
    found.refresh()
    assert found == result


@pytest.mark.usefixtures("in_atomic")
@pytest.mark.parametrize("id", ["", "x", "\x00", "7d1ad9ba-6c4f-4d2f-9b0c-2f6cb0a6ef3e", 5])
def test_an_unknown_result(alias: str, id: Any) -> None:
    with pytest.raises(exceptions.TaskResultDoesNotExist):
        add.get_result(id)


@pytest.mark.usefixtures("in_atomic")
def test_a_result_of_another_task(alias: str) -> None:
    result = add.enqueue(1)
    with pytest.raises(exceptions.TaskResultMismatch):
        add_async.get_result(result.id)


@pytest.mark.any_database
@pytest.mark.usefixtures("in_atomic")
@pytest.mark.parametrize(
    "refused",
    [datetime.now(), object(), b"\xff", {"x": {1}}, {(1, 2): 3}],
    ids=["datetime", "object", "bytes", "set", "key"],
)
def test_arguments_that_are_no_json(alias: str, refused: Any) -> None:
    with pytest.raises((TypeError, ValueError), match=r"Argument 2 of \S+\.add cannot be written"):
        add.enqueue(1, refused)
    with pytest.raises((TypeError, ValueError), match="Argument b= of"):
        add.enqueue(1, b=refused)
    add.enqueue(1)  # the transaction is usable
    assert len(rows(alias)[1]) == 1


@pytest.mark.any_database
@pytest.mark.usefixtures("in_atomic")
def test_arguments_that_are_too_large(alias: str, settings: Any) -> None:
    settings.OUTBOX = {**settings.OUTBOX, "MAX_MESSAGE_BYTES": 2000}
    with pytest.raises(InvalidJob, match="at most 2000"):
        add.enqueue("x" * 2000)
    assert rows(alias) == ([], [])


@pytest.mark.usefixtures("in_atomic")
def test_what_cannot_be_staged_leaves_no_result(alias: str) -> None:
    with pytest.raises(InvalidJob, match="further away"):
        add.using(run_after=timezone.now() + timedelta(days=999)).enqueue(1)
    assert rows(alias) == ([], [])


@pytest.mark.any_database
@pytest.mark.usefixtures("in_atomic")
def test_a_function_that_a_worker_would_not_find(alias: str) -> None:
    with pytest.raises(exceptions_of("InvalidTask"), match="finds no task at"):
        declared.renamed.enqueue()


def exceptions_of(name: str) -> Any:
    return getattr(exceptions, name, None) or getattr(exceptions, f"{name}Error")


@pytest.mark.any_database
@pytest.mark.usefixtures("in_atomic")
def test_the_queue(alias: str, app: Any) -> None:
    add.enqueue(1)
    assert message(alias)[0].queue == app.conf.task_default_queue
    StagedJob.objects.using(alias).all().delete()
    add.using(queue_name="mails").enqueue(1)
    assert message(alias)[0].queue == "mails"
    with pytest.raises(exceptions_of("InvalidTask"), match="not valid for backend"):
        add.using(queue_name="others")


@pytest.mark.any_database
@pytest.mark.usefixtures("in_atomic")
@pytest.mark.parametrize(
    ("url", "levels"), [("memory://", [10, 5, 4, 0]), ("amqp://", [0, 5, 6, 10])], ids=["", "amqp"]
)
def test_priorities(alias: str, app: Any, url: str, levels: list[int]) -> None:
    app.conf.broker_url = app.conf.broker_write_url = url
    for priority in (-100, 0, 20, 100):
        add.using(priority=priority).enqueue(1)
    jobs = StagedJob.objects.using(alias).order_by("id")
    assert [Message.loads(job.envelope).priority for job in jobs] == levels


@pytest.mark.usefixtures("in_atomic")
def test_a_task_that_is_to_run_later_is_held(alias: str) -> None:
    due = timezone.now() + timedelta(days=1)
    result = add.using(run_after=due).enqueue(1)
    job, envelope = message(alias)
    assert job.available_at == due
    assert datetime.fromisoformat(envelope.headers["eta"]) == due
    assert add.get_result(result.id).task.run_after == due
    assert TaskResult.objects.using(alias).get().kept_from == due

    job.as_dead(error="E", reason="not yet").save(using=alias)
    job.delete()
    requeue_dead(DeadJob.objects.using(alias).all())
    assert StagedJob.objects.using(alias).get().available_at == due
    assert TaskResult.objects.using(alias).get().kept_from == due


@pytest.mark.usefixtures("in_atomic")
def test_a_time_without_a_zone_is_the_projects(alias: str, settings: Any) -> None:
    settings.USE_TZ, settings.TIME_ZONE = False, "Asia/Kolkata"
    due = timezone.now() + timedelta(days=1)
    with timezone.override("Pacific/Auckland"):  # of the visitor
        add.using(run_after=due).enqueue(1)
    assert message(alias)[1].headers["eta"] == f"{due.isoformat()}+05:30"


@pytest.mark.any_database
@pytest.mark.usefixtures("in_atomic")
def test_logs_of_celery_name_the_function(alias: str) -> None:
    add.enqueue(1)
    assert message(alias)[1].headers["shadow"] == "tests.django_tasks.declared.add"


@pytest.mark.any_database
@pytest.mark.usefixtures("in_atomic")
def test_the_signal_has_the_result(alias: str) -> None:
    heard: list[Any] = []

    def hear(sender: Any, task_result: Any, **kwargs: Any) -> None:
        heard.append((sender.__name__, task_result.id, task_result.status))
        raise ValueError("of the receiver")  # which ends nothing

    signals.task_enqueued.connect(hear)
    try:
        result = add.enqueue(1)
    finally:
        signals.task_enqueued.disconnect(hear)
    assert heard == [("OutboxBackend", result.id, "READY")]


@pytest.mark.any_database
@pytest.mark.usefixtures("in_atomic")
def test_a_receiver_that_undoes_the_transaction_fails_the_call(alias: str) -> None:
    def mark(**kwargs: Any) -> None:
        transaction.set_rollback(True, using=alias)
        raise IntegrityError("of a row that the receiver has saved")

    signals.task_enqueued.connect(mark)
    try:
        with pytest.raises(IntegrityError):
            add.enqueue(1)
    finally:
        signals.task_enqueued.disconnect(mark)


@pytest.mark.django_db(transaction=True)
def test_outside_a_transaction_it_is_sent(alias: str, app: Any) -> None:
    result = add.enqueue(1)
    assert rows(alias) == ([], [result.id])
    with app.connection_for_read() as connection:
        queue = connection.SimpleQueue(app.conf.task_default_queue)
        assert queue.get_nowait().headers["id"] == result.id
        queue.close()


@pytest.mark.django_db(transaction=True)
def test_what_cannot_be_sent_leaves_no_result(
    alias: str, app: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*args: Any, **kwargs: Any) -> None:
        raise ConnectionError("refused")

    monkeypatch.setattr(app.amqp, "send_task_message", refuse)
    with pytest.raises(ConnectionError):
        add.enqueue(1)
    assert rows(alias) == ([], [])


def test_the_caller_is_told_of_the_first_error(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """After it nothing can be executed in the transaction, so the result cannot be deleted."""

    def fail(*args: Any, **options: Any) -> None:
        transaction.set_rollback(True, using=alias)
        raise OperationalError("locked")

    monkeypatch.setattr("outbox_app.jobs.staging.insert.write", fail)
    with pytest.raises(OperationalError, match="locked"), transaction.atomic(using=alias):
        add.enqueue(1)
    assert rows(alias) == ([], [])


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("outside", ["stage", "refuse"])
def test_outside_a_transaction_the_setting_decides(alias: str, settings: Any, outside: str) -> None:
    settings.OUTBOX = {**settings.OUTBOX, "OUTSIDE": outside}
    if outside == "refuse":
        with pytest.raises(NotAtomic, match=r"declared\.add was called outside"):
            add.enqueue(1)
        assert rows(alias) == ([], [])
    else:
        result = add.enqueue(1)
        assert rows(alias) == ([result.id], [result.id])


@pytest.mark.django_db
def test_the_transaction_of_a_test_is_none_of_the_code(alias: str) -> None:
    add.enqueue(1)
    with pytest.raises(AssertionError, match="called outside a transaction"):
        assert_staged(RUN_TASK)
    with transaction.atomic(using=alias):
        add.enqueue(2)
    assert len(assert_staged(RUN_TASK, count=2, outside=True)) == 2


@pytest.mark.any_database
@pytest.mark.usefixtures("in_atomic")
def test_a_plain_app_stages_too(alias: str, current: Any) -> None:
    from celery import Celery

    app = Celery("plain", broker="memory://", set_as_current=False)
    current(app)
    result = add.enqueue(1)
    assert rows(alias) == ([result.id], [result.id])
    app.close()


@pytest.mark.any_database
@pytest.mark.usefixtures("in_atomic")
def test_eagerly_it_runs_at_once(alias: str, app: Any) -> None:
    app.conf.task_always_eager = True
    result = add.enqueue(1, 2)
    result.refresh()
    assert (result.status, result.return_value) == ("SUCCESSFUL", 3)


@pytest.mark.usefixtures("in_atomic")
def test_what_is_cancelled_has_no_result(alias: str) -> None:
    kept, result = add.enqueue(1), add.enqueue(2)
    assert cancel(result.id)
    assert rows(alias) == ([kept.id], [kept.id])
    TaskResult.objects.using(alias).update(status=TaskResult.Status.SUCCESSFUL)
    assert cancel(kept.id)
    assert rows(alias) == ([], [kept.id])  # it has run, from an earlier delivery


@pytest.mark.skipif(len(connections.settings) < 2, reason="there is one database only")
@pytest.mark.django_db(databases="__all__", transaction=True)
@pytest.mark.any_database
def test_a_transaction_on_another_database_only(alias: str) -> None:
    other = next(each for each in connections if each != alias)
    with transaction.atomic(using=other), pytest.raises(NotAtomic, match="it would not be atomic"):
        add.enqueue(1)
    assert rows(alias) == ([], [])


@pytest.mark.usefixtures("backend")
def test_a_receipt_in_options(alias, settings):
    from tests.django_tasks.conftest import BACKEND

    settings.TASKS = {"default": {**BACKEND, "OPTIONS": {"receipt": 60}}}
    with transaction.atomic(using=alias):
        declared.add.enqueue(1)
    declared.add.enqueue(2)  # staged outside a transaction, too
    assert list(StagedJob.objects.using(alias).values_list("receipt", flat=True)) == [60, 60]
