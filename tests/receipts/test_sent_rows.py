"""What the drain does with jobs that have a receipt: it marks, waits, and sends again."""

from __future__ import annotations

from contextlib import closing
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from django.db import OperationalError, connections, transaction

from outbox_app.database.clock import DatabaseNow
from outbox_app.exceptions import NoReceipt
from outbox_app.jobs import requeue_dead, staged
from outbox_app.jobs.drain import dead_rows, resending
from outbox_app.jobs.drain.app_drain import AppDrain
from outbox_app.jobs.drain.drain import Drain
from outbox_app.jobs.drain.incidents import record_takeover
from outbox_app.jobs.runs import lock_idle
from outbox_app.jobs.staged import cancel, reschedule
from outbox_app.models import DeadJob, Incident, Run, StagedJob
from outbox_app.receipts.ledger import Address, Ledger
from tests.celery_worker import received

pytestmark = pytest.mark.django_db(transaction=True)

BROKERS = {"default": "redis_url", "postgres": "rabbitmq_url", "mariadb": "redis_url"}
BROKERS["mysql"] = BROKERS["mariadb"]


@pytest.fixture
def app(alias: str, make_app: Any, receipts: None, request: Any) -> Any:
    return make_app(request.getfixturevalue(BROKERS[alias]))


@pytest.fixture
def stage(alias: str, app: Any) -> Any:
    def stage(**options: Any) -> Any:
        with transaction.atomic(using=alias):
            return app.send_task("work", (1,), **options)

    return stage


def drain(alias: str) -> int:
    return Drain(using=alias).run(once=True).published


def row(alias: str) -> StagedJob:
    return StagedJob.objects.using(alias).annotate(now=DatabaseNow()).get()


def turn_back(alias: str) -> None:
    """Let the limit of all sent rows be over."""
    long_ago = DatabaseNow() - timedelta(seconds=1)
    StagedJob.objects.using(alias).sent().update(available_at=long_ago)


def begin(alias: str, job: StagedJob, *, seconds: float = 60) -> None:
    """A worker executes a job."""
    Run.objects.using(alias).create(
        staged_id=job.pk,
        worker="celery@w1",
        token="t",
        attempts=1,
        retries=0,
        started_at=DatabaseNow(),
        lease_until=DatabaseNow() + timedelta(seconds=seconds),
    )


def test_a_sent_row_stays_and_its_message_names_it(alias, app, stage):
    result = stage()
    assert drain(alias) == 1
    job = row(alias)
    assert (job.publishes, job.receipt, job.task_id) == (1, 3600, result.id)
    assert timedelta(seconds=3590) < job.available_at - job.now <= timedelta(seconds=3600)
    assert drain(alias) == 0
    [message] = received(app)
    assert message.headers["outbox_row"] == f"{job.pk}@{alias}@{job.task_id}"
    jobs = StagedJob.objects.using(alias)
    assert [len(part) for part in (jobs.ready(), jobs.held(), jobs.due(), jobs.sent())] == [
        *(0, 0, 0, 1)
    ]


def test_a_lost_message_is_sent_again_after_its_limit_with_an_incident(alias, app, stage):
    stage()
    for publishes in (1, 2, 3):
        assert drain(alias) == 1
        job = row(alias)
        assert job.publishes == publishes
        seconds = (job.available_at - job.now).total_seconds()
        assert 0 <= 3600 * 2 ** (publishes - 1) - seconds < 60
        assert Incident.objects.using(alias).filter(kind="no_receipt").count() == publishes - 1
        assert len(received(app)) == 1  # lost
        turn_back(alias)


def test_it_waits_while_messages_are_in_its_queue(alias, app, stage):
    """A slow queue does not grow by copies of itself."""
    stage()
    assert drain(alias) == 1
    turn_back(alias)
    assert drain(alias) == 0
    job = row(alias)
    assert (job.publishes, Incident.objects.using(alias).count()) == (1, 0)
    assert job.available_at > job.now
    assert len(received(app)) == 1


def test_it_waits_while_a_worker_executes_it(alias, app, stage):
    stage()
    drain(alias)
    received(app)
    begin(alias, row(alias))
    turn_back(alias)
    assert drain(alias) == 0
    assert row(alias).publishes == 1

    Run.objects.using(alias).update(lease_until=DatabaseNow() - timedelta(seconds=1))
    turn_back(alias)
    assert drain(alias) == 1


def test_after_five_publishes_without_a_start_it_is_dead(alias, app, stage):
    stage()
    drain(alias)
    received(app)
    StagedJob.objects.using(alias).update(publishes=5)
    turn_back(alias)
    assert drain(alias) == 0
    dead = DeadJob.objects.using(alias).get()
    assert dead.error == "outbox_app.exceptions.NoReceipt"
    assert dead.reason.startswith("The job was published 5 times; no worker with receipts has")
    assert not StagedJob.objects.using(alias).exists()

    requeue_dead(DeadJob.objects.using(alias))
    job = row(alias)
    assert (job.receipt, job.publishes, job.sent_at) == (3600, None, None)
    assert drain(alias) == 1


def retry(alias: str, job: StagedJob) -> None:
    """The worker of a job has sent its retry for tomorrow."""
    with closing(Ledger(alias)) as ledger:
        ledger.drop(Address(job.pk, alias, job.task_id), "t", retry_in=86400)


@pytest.mark.parametrize("waiting", [0, 1])
def test_a_retry_while_the_drain_looks_is_not_sent_early(alias, app, stage, monkeypatch, waiting):
    """Neither counted as waiting from now on, nor given up for its earlier publishes."""
    stage()
    drain(alias)
    received(app)
    StagedJob.objects.using(alias).update(publishes=1 if waiting else 5)
    turn_back(alias)
    look = resending.running

    def running(*args: Any, **options: Any) -> set[int]:
        found = look(*args, **options)
        retry(alias, row(alias))
        return found

    monkeypatch.setattr(resending, "running", running)
    monkeypatch.setattr(
        AppDrain, "waiting", lambda self, queues, **options: dict.fromkeys(queues, waiting)
    )
    assert drain(alias) == 0
    job = row(alias)
    assert job.available_at - job.now > timedelta(hours=24)
    assert job.publishes == 1


def test_a_retry_ends_the_hold_of_immediate_delivery(alias, app, stage):
    """The hold of a row that its worker has ended, before its process could mark it."""
    stage()
    StagedJob.objects.using(alias).update(is_immediate=True)
    retry(alias, row(alias))
    assert row(alias).is_immediate is None


def test_a_sent_row_without_a_time_gets_one(alias, app, stage):
    stage()
    drain(alias)
    received(app)
    StagedJob.objects.using(alias).update(available_at=None)
    assert drain(alias) == 1
    job = row(alias)
    assert (job.publishes, job.available_at > job.now) == (2, True)
    assert drain(alias) == 0


def test_one_that_was_begun_is_not_dead_by_its_publishes(alias, app, stage):
    stage()
    drain(alias)
    received(app)
    StagedJob.objects.using(alias).update(publishes=5)
    begin(alias, row(alias), seconds=-1)
    turn_back(alias)
    assert drain(alias) == 1


def test_cancel_works_until_a_worker_begins(alias, app, stage):
    result = stage()
    drain(alias)
    assert cancel(result.id, using=alias, app=app)
    assert not StagedJob.objects.using(alias).exists()

    result = stage()
    drain(alias)
    begin(alias, row(alias))
    assert not cancel(result.id, using=alias, app=app)
    assert StagedJob.objects.using(alias).exists()

    Run.objects.using(alias).update(lease_until=DatabaseNow() - timedelta(seconds=1))
    assert cancel(result.id, using=alias, app=app)
    assert not StagedJob.objects.using(alias).exists()
    assert not Run.objects.using(alias).exists()


@pytest.mark.timeout(30)
@pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)
def test_a_worker_waits_for_a_locked_row_for_a_moment(alias, app, stage):
    stage()
    drain(alias)
    job = Address((found := row(alias)).pk, alias, found.task_id)
    rows = StagedJob.objects.using(alias)
    with closing(Ledger(alias)) as ledger:
        options = {"worker": "w", "token": "t", "retries": 0, "seconds": 60}
        with transaction.atomic(using=alias):
            rows.select_for_update().get()
            for statement in (
                lambda: ledger.begin(job, **options),
                lambda: ledger.drop(job, "t", retry_in=1),
                lambda: ledger.end(job),
            ):
                with pytest.raises(OperationalError):
                    statement()
        assert ledger.begin(job, **options) == 1


@pytest.mark.timeout(30)
@pytest.mark.parametrize("alias", ["postgres"], indirect=True)
def test_a_transaction_that_could_not_cancel_a_job_lets_its_lease_be_renewed(alias, app, stage):
    result = stage()
    drain(alias)
    begin(alias, row(alias))
    with closing(Ledger(alias)) as ledger, transaction.atomic(using=alias):
        assert not cancel(result.id, using=alias, app=app)
        ledger.renew([(row(alias).pk, "t")], seconds=90)


@pytest.mark.parametrize("alias", ["postgres"], indirect=True)
def test_who_gives_a_job_up_sees_what_was_begun(alias, app, stage, monkeypatch):
    """At REPEATABLE READ a worker that begins it changes no row that a lock would notice."""
    levels = []
    connection = connections[alias]

    def look(*args: Any, **options: Any) -> set[int]:
        with connection.cursor() as cursor:
            cursor.execute("SHOW transaction_isolation")
            levels.append(cursor.fetchone()[0])
        return lock_idle(*args, **options)

    for module in (staged, dead_rows):
        monkeypatch.setattr(module, "lock_idle", look)
    session = "SET SESSION CHARACTERISTICS AS TRANSACTION ISOLATION LEVEL"
    with connection.cursor() as cursor:
        cursor.execute(f"{session} REPEATABLE READ")
    try:
        for give_up in (
            lambda job: dead_rows.move_to_dead(job, NoReceipt("lost"), using=alias),
            lambda job: staged.cancel_for(
                StagedJob.objects.using(alias), until=job.pk, asked=job.now
            ),
        ):
            stage()
            drain(alias)
            give_up(row(alias))
            assert not StagedJob.objects.using(alias).exists()
    finally:
        with connection.cursor() as cursor:
            cursor.execute(f"{session} READ COMMITTED")
    assert levels == ["read committed"] * 2


def test_a_sent_job_is_not_rescheduled(alias, app, stage):
    result = stage(countdown=3600)
    StagedJob.objects.using(alias).update(available_at=DatabaseNow())
    assert drain(alias) == 1
    assert not reschedule(result.id, eta=datetime.now(UTC) + timedelta(hours=2), using=alias)


def test_a_job_with_an_eta_is_held_until_it_is_due(alias, app, stage):
    """Its limit begins when it is sent; without a receipt, a worker would hold it."""
    stage(countdown=60)
    job = row(alias)
    assert timedelta(seconds=50) < job.available_at - job.now < timedelta(seconds=70)


def test_sent_rows_do_not_stretch_the_incident_of_a_takeover(alias, app, stage):
    stage()
    drain(alias)
    stage()
    stage()
    stage()
    drain_to = StagedJob.objects.using(alias).order_by("id")
    sent, *_, last = drain_to
    StagedJob.objects.using(alias).filter(pk=last.pk).update(
        sent_at=DatabaseNow(), publishes=1, available_at=DatabaseNow() + timedelta(hours=1)
    )
    record_takeover("dead", {1}, using=alias, by="other")
    incident = Incident.objects.using(alias).get()
    assert (incident.first_id, incident.last_id) == (sent.pk + 1, last.pk - 1)
