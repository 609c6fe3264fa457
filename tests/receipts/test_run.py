"""What a worker makes of a message: the tracer of Celery is replaced, nothing else."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from billiard.exceptions import TimeLimitExceeded
from celery import states
from celery.app.task import Task
from celery.app.trace import TraceInfo, build_tracer, trace_ok_t
from celery.exceptions import Ignore, Reject, Retry
from celery.worker.state import active_requests
from django.db import OperationalError, transaction
from kombu.exceptions import OperationalError as BrokerAway

from outbox_app import idempotent
from outbox_app.database.clock import DatabaseNow
from outbox_app.jobs.drain.drain import Drain
from outbox_app.jobs.staging import insert
from outbox_app.models import DeadJob, InboxEntry, Run, StagedJob
from outbox_app.receipts import keeper, settling, tracer
from outbox_app.receipts.ledger import Address, Ledger
from outbox_app.receipts.run import new_token
from outbox_app.receipts.tracer import SKIPPED, TracerAttribute, with_receipt
from tests.patience import eventually

pytestmark = pytest.mark.django_db(transaction=True)

SUCCESS = trace_ok_t("done", None, 0.0, "'done'")


@pytest.fixture(autouse=True)
def own_keepers(settings: Any, alias: str, receipts: None) -> Iterator[None]:
    settings.OUTBOX = {**settings.OUTBOX, "RECEIPT_LEASE_SECONDS": 2.0}
    yield
    keeper.stop_keepers()
    keeper._keepers.clear()


@pytest.fixture
def app(make_app: Any) -> Any:
    return make_app(result_backend="cache+memory://")


@pytest.fixture
def work(app: Any) -> Any:
    return app.task(name="work", shared=False, lazy=False)(nothing)


@pytest.fixture
def message(alias: str, app: Any, work: Any) -> Any:
    """``message()``: stage and drain a job; return its request as a worker has it."""

    def make(task: Any = work) -> dict[str, Any]:
        with transaction.atomic(using=alias):
            result = task.delay()
        assert Drain(using=alias).run(once=True).published == 1
        job = StagedJob.objects.using(alias).get(task_id=result.id)
        address = {"outbox_row": f"{job.pk}@{alias}@{result.id}", "hostname": "celery@w1"}
        return {"id": result.id, "task": task.name, "retries": 0, **address}

    return make


def execute(task: Any, request: dict[str, Any], result: Any = SUCCESS) -> Any:
    """Give a message to the task's wrapped tracer, which returns, or calls, ``result``."""

    def trace(*args: Any) -> Any:
        return result() if callable(result) else result

    return with_receipt(task, trace)(request["id"], (), {}, request)


def execute_with_celery(task: Any, request: dict[str, Any]) -> Any:
    """Give a message to Celery's own tracer of the task, wrapped."""
    trace = with_receipt(task, build_tracer(task.name, task, app=task.app))
    return trace(request["id"], (), {}, {**request, "args": [], "kwargs": {}})


@dataclass(eq=False)
class Request:
    """What the main process of a worker has of a message."""

    id: str
    worker_pid: int
    request_dict: dict[str, Any]


def nothing() -> None: ...


def never() -> Any:
    raise AssertionError("the body was executed")


def left(alias: str) -> tuple[int, int]:
    return tuple(each.objects.using(alias).count() for each in (StagedJob, Run))  # type: ignore


def hold(alias: str, request: dict[str, Any], *, seconds: float = 60, **values: Any) -> Any:
    """Another worker runs the job."""
    values = {"worker": "w2", "token": "other", "attempts": 1, "retries": 0, **values}
    until = DatabaseNow() + timedelta(seconds=seconds)
    staged = int(request["outbox_row"].partition("@")[0])
    times = {"started_at": DatabaseNow(), "lease_until": until}
    return Run.objects.using(alias).create(staged_id=staged, **values, **times)


def renew(alias: str, seconds: float) -> None:
    Run.objects.using(alias).update(lease_until=DatabaseNow() + timedelta(seconds=seconds))


def test_the_run_is_there_while_the_body_runs(alias, work, message):
    def body() -> Any:
        run = Run.objects.using(alias).get()
        assert (run.worker, run.attempts, run.retries) == ("celery@w1", 1, 0)
        return SUCCESS

    assert execute(work, message(), body) == SUCCESS
    assert left(alias) == (0, 0)


def test_a_message_without_a_row_is_executed(work):
    assert execute(work, {"id": "x"}) == SUCCESS


def test_a_message_whose_job_has_ended_is_skipped(alias, work, message):
    request = message()
    execute(work, request)
    assert execute(work, request, never) == SKIPPED


@pytest.mark.timeout(20)
@pytest.mark.parametrize("other", ["0", "other"])
def test_one_whose_row_is_another_job_s_is_skipped(alias, work, message, other):
    """Ids are given out again after a restored backup."""
    request = message()
    StagedJob.objects.using(alias).update(task_id=other)
    assert execute(work, request, never) == SKIPPED
    assert left(alias) == (1, 0)


def test_the_end_of_a_job_leaves_the_run_of_another_that_has_its_id(alias, message):
    request = message()
    hold(alias, request)
    staged = int(request["outbox_row"].partition("@")[0])
    with closing(Ledger(alias)) as ledger:
        ledger.end(Address(staged, alias, "0"))
        assert left(alias) == (1, 1)
        ledger.end(Address(staged, alias, request["id"]))
        assert left(alias) == (0, 0)


@pytest.mark.parametrize("header", ["x", 7, "", "7@default", "x@default@child"])
def test_a_header_that_is_another_message_s_is_no_address(alias, work, message, header):
    """Tasks pass headers of their own message on: ``apply_async(headers=self.request.headers)``."""
    request = {**message(), "id": "child"}
    assert execute(work, request) == SUCCESS
    assert execute(work, {**request, "outbox_row": header}) == SUCCESS
    assert left(alias) == (1, 0)


@pytest.fixture
def after_looks(monkeypatch):
    """``after_looks(*steps)``: another worker makes a step after each look at its run."""

    def make(*steps: Any) -> list[Any]:
        look, left = Ledger.look, list(steps)

        def then(self: Any, *args: Any) -> Any:
            seen = look(self, *args)
            if left:
                left.pop(0)()
            return seen

        monkeypatch.setattr(Ledger, "look", then)
        return left

    return make


def test_a_copy_is_skipped_once_the_other_worker_renews_its_lease(
    alias, work, message, after_looks
):
    request = message()
    hold(alias, request)
    steps = after_looks(lambda: None, lambda: renew(alias, 90))
    assert execute(work, request, never) == SKIPPED
    assert (steps, left(alias)) == ([], (1, 1))


def test_a_lost_worker_s_job_is_taken_over_when_its_lease_ends(alias, work, message):
    request = message()
    hold(alias, request, seconds=0.5)

    def body() -> Any:
        assert Run.objects.using(alias).get().attempts == 2
        return SUCCESS

    assert execute(work, request, body) == SUCCESS
    assert left(alias) == (0, 0)


def test_a_retry_waits_for_the_run_that_has_sent_it(alias, work, message, after_looks):
    """Although that renews its lease: it is about to end."""
    request = message()
    hold(alias, request)
    renewals = [partial(renew, alias, 90 + n) for n in range(3)]
    steps = after_looks(*renewals, Run.objects.using(alias).all().delete)
    assert execute(work, {**request, "retries": 1}) == SUCCESS
    assert steps == []


def test_after_the_last_attempt_it_is_dead(alias, work, message):
    request = message()
    hold(alias, request, seconds=-1, attempts=3)
    assert execute(work, request, never) == SKIPPED
    assert left(alias) == (0, 0)
    dead = DeadJob.objects.using(alias).get()
    assert dead.reason.startswith("The job was begun 3 times, and no worker has executed it")


def test_after_a_retry_the_limit_begins_with_it(alias, work, message):
    request = message()
    StagedJob.objects.using(alias).update(publishes=4)
    info = TraceInfo(states.RETRY, Retry(when=1000))
    execute(work, request, trace_ok_t(None, info, 0.0, None))
    job = StagedJob.objects.using(alias).annotate(now=DatabaseNow()).get()
    assert 4590 < (job.available_at - job.now).total_seconds() <= 4600
    assert (job.publishes, Run.objects.using(alias).count()) == (1, 0)


@pytest.mark.parametrize(("requeue", "rows"), [(True, (1, 0)), (False, (0, 0))])
def test_rejected(alias, work, message, requeue, rows):
    info = TraceInfo(states.REJECTED, Reject(requeue=requeue))
    execute(work, message(), trace_ok_t(None, info, 0.0, None))
    assert left(alias) == rows


@pytest.mark.parametrize("options", [{}, {"autoretry_for": [ValueError]}])
def test_a_retry_that_the_broker_refuses_is_no_end(alias, app, message, options, monkeypatch):
    """Celery rejects the message then, without requeue."""

    @app.task(name="again", shared=False, lazy=False, bind=True, **options)
    def again(self: Any) -> None:
        raise ValueError if options else self.retry()

    def refuse(*args: Any, **options: Any) -> None:
        raise BrokerAway

    request = message(again)
    monkeypatch.setattr(app, "send_task", refuse)
    result = execute_with_celery(again, request)
    assert (result[1].state, result[1].retval.requeue) == (states.REJECTED, False)
    assert left(alias) == (1, 0)


def test_a_job_whose_next_step_is_not_staged_has_not_ended(alias, work, message, monkeypatch):
    """Celery reports an internal error. The next attempt stages the step."""
    real, calls = insert._insert, []

    def fail_once(*args: Any, **options: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise OperationalError("away")
        real(*args, **options)

    request = {**message(), "chain": [work.si()]}
    monkeypatch.setattr(insert, "_insert", fail_once)
    with pytest.warns(RuntimeWarning, match="away"):
        execute_with_celery(work, request)
    assert left(alias) == (1, 1)
    assert not keeper.keeper_of(alias)._runs
    Run.objects.using(alias).update(lease_until=DatabaseNow() - timedelta(seconds=1))
    execute_with_celery(work, request)
    assert left(alias) == (1, 0)
    assert StagedJob.objects.using(alias).get().task_id != request["id"]


@pytest.mark.parametrize(
    ("seconds", "terminated", "rows"),
    [(60, False, (1, 1)), (60, True, (0, 0)), (-1, False, (0, 0))],
)
def test_a_revoked_copy_ends_no_job_that_is_executed(alias, message, seconds, terminated, rows):
    request = message()
    hold(alias, request, seconds=seconds)
    revoked = SimpleNamespace(id=request["id"], outbox_row=request["outbox_row"])
    settling.settle_revoked(revoked, terminated=terminated, signum=None, expired=True)
    assert left(alias) == rows


@pytest.mark.parametrize(
    ("token", "is_active", "rows"),
    [(None, False, (0, 0)), ("other", False, (1, 1)), (None, True, (1, 1))],
)
def test_a_hard_limit_ends_the_run_of_its_process(alias, message, token, is_active, rows):
    """Not another's; nor that of a second job with the same task id, which is still active."""
    request = message()
    hold(alias, request, token=token or new_token())
    received = Request(request["id"], os.getpid(), request)
    settling.remember(received)
    if is_active:
        active_requests.add(received)
    settling.settle_hard_limit(request["id"], TimeLimitExceeded(1))
    assert left(alias) == rows


def test_a_worker_that_ends_leaves_its_run(alias, work, message):
    def body() -> Any:
        raise SystemExit

    with pytest.raises(SystemExit):
        execute(work, message(), body)
    assert left(alias) == (1, 1)
    assert not keeper.keeper_of(alias)._runs


def test_leases_are_renewed(alias, work, message):
    def body() -> Any:
        runs = Run.objects.using(alias)
        before = runs.get().lease_until
        with keeper.keeper_of(alias).ledger._lock:  # a statement of another job waits
            eventually(lambda: runs.get().lease_until != before)
        return SUCCESS

    execute(work, message(), body)


def test_an_end_that_the_database_refuses_is_repeated(alias, work, message, monkeypatch):
    end, calls = Ledger.end, []

    def fail_once(self: Any, *args: Any, **options: Any) -> None:
        calls.append(1)
        if len(calls) == 1:
            raise OperationalError("away")
        end(self, *args, **options)

    monkeypatch.setattr(Ledger, "end", fail_once)
    assert execute(work, message()) == SUCCESS
    eventually(lambda: left(alias) == (0, 0))


def test_without_the_database_no_body_runs(alias, work, message, monkeypatch):
    def fail(self: Any, *args: Any, **options: Any) -> None:
        raise OperationalError("away")

    monkeypatch.setattr(Ledger, "begin", fail)
    monkeypatch.setattr(tracer, "AWAY_SECONDS", 0.01)
    result = execute(work, message(), never)
    assert result[1].state == states.REJECTED
    assert result[1].retval.requeue is True
    assert left(alias) == (1, 0)


def test_the_inbox_keeps_no_entry_of_a_job_with_a_receipt(alias, app, message):
    once = app.task(name="once", shared=False, lazy=False)(idempotent(nothing))
    request = message(once)
    execute_with_celery(once, request)
    assert left(alias) == (0, 0)
    assert not InboxEntry.objects.using(alias).exists()


def test_the_entry_of_the_task_that_replaces_it_stays(alias, app, message):
    """It has the same id, and may be quicker than the end of the one that it replaces."""

    def replace() -> None:
        raise Ignore

    replaced = app.task(name="replaced", shared=False, lazy=False)(idempotent(replace))
    request = message(replaced)
    real = build_tracer(replaced.name, replaced, app=app)

    def trace(*args: Any) -> Any:
        result = real(*args)
        InboxEntry.objects.using(alias).create(job_id=request["id"])
        return result

    with_receipt(replaced, trace)(request["id"], (), {}, {**request, "args": [], "kwargs": {}})
    assert left(alias) == (0, 0)
    assert InboxEntry.objects.using(alias).exists()


def test_workers_wrap_the_tracer_and_eager_calls_do_not_pass_it(alias, app, work):
    assert isinstance(vars(Task)["__trace__"], TracerAttribute)
    assert work.__trace__ is None
    calls = []
    work.__trace__ = lambda *args: calls.append(args)
    assert work.__trace__.__wrapped__
    work.apply()
    work()
    assert not calls
