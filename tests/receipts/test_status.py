"""What the status, the metrics and the admin say of jobs that the broker has taken."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from outbox_app.admin.overview import headline
from outbox_app.database.clock import DatabaseNow
from outbox_app.jobs.drain import status
from outbox_app.management.commands.outbox_status import table
from outbox_app.models import Incident, Lease, Run, StagedJob, counting
from outbox_app.monitoring.diagnosis import problems
from outbox_app.monitoring.status import outbox_status
from outbox_app.receipts.ledger import Address, Ledger
from outbox_app.receipts.status import Sent, sent_jobs
from tests.admin.pages import OVERVIEW, STAGED, page, text
from tests.admin.test_lists import listed
from tests.jobs.dead.rows import staged_jobs
from tests.jobs.dead.test_status import drainer, hold

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def sent(alias: str) -> Any:
    """``sent(task_id, minutes)``: a job with a limit of an hour, sent so many minutes ago."""

    def sent(task_id: str, minutes: float = 1, **columns: Any) -> StagedJob:
        [job] = staged_jobs(using=alias, task_id=task_id, receipt=3600, **columns)
        StagedJob.objects.using(alias).filter(pk=job.pk).update(
            sent_at=DatabaseNow() - timedelta(minutes=minutes),
            available_at=DatabaseNow() + timedelta(minutes=60 - minutes % 60),
        )
        return job

    return sent


@pytest.fixture
def runs(alias: str) -> Any:
    """``runs(job, seconds)``: a worker executes the job, and has a lease for so long."""

    def runs(job: StagedJob, seconds: float = 600, attempts: int = 1) -> None:
        Run.objects.using(alias).create(
            staged_id=job.pk, worker="celery@w1", token="t", attempts=attempts, retries=0,
            started_at=DatabaseNow() - timedelta(hours=2),
            lease_until=DatabaseNow() + timedelta(seconds=seconds),
        )  # fmt: skip

    return runs


@pytest.fixture
def some(alias: str, sent: Any, runs: Any) -> None:
    """Jobs in each state: of one queue whose worker works, and of one whose worker is silent."""
    sent("new", queue="fast", task="a")
    runs(sent("long", 120, queue="fast", task="a"))
    lost = sent("lost", 120, queue="fast", task="b", publishes=2)
    runs(lost, seconds=-60, attempts=2)
    sent("late", 61, queue="slow", task="a", publishes=1)
    sent("again", 5, queue="slow", task="a", publishes=3)
    staged_jobs(using=alias, task_id="ready", queue="slow", task="a")
    [held] = staged_jobs(using=alias, task_id="held", queue="slow", task="a")
    hold(alias, held, minutes=5)


def test_counts_by_queue_and_task(alias, some):
    found = sent_jobs(using=alias)
    assert found.groups == {
        ("slow", "a"): Sent(waiting=2, running=0, again=1, not_started=2),
        ("fast", "a"): Sent(waiting=1, running=1, again=0, not_started=0),
        ("fast", "b"): Sent(waiting=1, running=0, again=1, not_started=0),
    }
    assert next(iter(found.groups)) == ("slow", "a")
    assert (found.total, found.not_started) == (Sent(4, 1, 2, 2), {"slow": 2})
    assert found.complete


def test_the_limit_begins_anew_with_a_retry(alias, sent, runs):
    job = sent("retry", 120, publishes=2)
    runs(job)
    ledger = Ledger(alias)
    ledger.drop(Address(job.pk, alias, job.task_id), "t", retry_in=7200)
    ledger.close()
    assert sent_jobs(using=alias).total == Sent(waiting=1)
    assert not StagedJob.objects.using(alias).not_started().exists()


def test_a_sent_job_is_not_held(alias, some):
    assert status.held(using=alias) == status.Held(due=0, within_the_hour=1, later=0)


def test_a_part_of_the_rows_says_so(alias, sent, monkeypatch):
    monkeypatch.setattr(counting, "MANY", 3)
    for number in range(3):
        sent(f"{number}")
    assert sent_jobs(using=alias).complete
    sent("3")
    found = sent_jobs(using=alias)
    assert not found.complete
    assert found.shown(found.total.waiting) == "4+"
    sent("4")
    assert sent_jobs(using=alias).total.waiting == 4


def test_one_statement_whatever_there_is(alias, some, sent):
    def statements() -> int:
        with CaptureQueriesContext(connections[alias]) as queries:
            sent_jobs(using=alias)
        return len(queries)

    before = statements()
    for number in range(30):
        sent(f"{number}", queue=f"q{number}", task=f"t{number}")
    assert statements() == before


def test_status(alias, some):
    found = outbox_status()
    lines = list(table(found, []))
    assert (
        "sent        4 waiting for a worker, 1 running, 2 sent again, 2 not started within their "
        "limit" in lines
    )
    assert "  slow: a  2 waiting, 0 running, 1 sent again, 2 not started" in lines
    told = found.as_json()["sent"]
    assert {name: told[name] for name in ("waiting", "running", "again", "not_started")} == {
        "waiting": 4, "running": 1, "again": 2, "not_started": 2,
    }  # fmt: skip
    assert told["by_task"][0] == {
        "queue": "slow", "task": "a", "waiting": 2, "running": 0, "again": 1, "not_started": 2,
    }  # fmt: skip


def test_without_receipts_nothing_is_said(alias):
    staged_jobs(using=alias)
    found = outbox_status()
    assert not [line for line in table(found, []) if line.startswith("sent")]
    assert not [each for each in found.figures() if each.title == "Waiting for a worker"]
    assert found.as_json()["sent"]["by_task"] == []


def test_a_worker_that_is_silent_is_the_headline(alias, some):
    row = drainer(alias)
    Lease.objects.using(alias).bulk_create(
        Lease(resource="jobs", part=part, owner=row.pk) for part in range(128)
    )
    found = outbox_status()
    [problem] = [each for each in problems(found) if each.code == "not_started"]
    assert problem.text == "No worker has started 2 sent jobs within their limit."
    assert problem.detail == "slow: 2 not started"
    assert problem.severity == "bad"
    tone, sentence, _ = headline(found, [problem], {"jobs"})
    assert (tone, sentence) == ("bad", problem.text)


def test_metrics(alias, some):
    samples = {
        (name, labels): value for each in outbox_status().figures() if each.metric
        for name, labels, value in each.samples()
    }  # fmt: skip
    assert samples["outbox_sent_jobs", ("waiting", "slow", "a")] == 2
    assert samples["outbox_sent_jobs", ("running", "fast", "a")] == 1
    assert samples["outbox_sent_jobs", ("again", "fast", "b")] == 1
    assert samples["outbox_not_started_jobs", ("slow",)] == 2


def test_the_list_and_its_filters(alias, superuser, some):
    for query, expected in (
        ({"state": "sent"}, ["again", "late", "lost", "long", "new"]),
        ({"state": "running"}, ["long"]),
        ({"state": "not_started"}, ["again", "late"]),
        ({"state": "not_started", "queue": "fast"}, []),
        ({"state": "sent", "queue": "fast", "task": "a"}, ["long", "new"]),
        ({"state": "held"}, ["held"]),
        ({"state": "due"}, []),
        ({"state": "ready"}, ["ready"]),
    ):
        assert listed(superuser.get(STAGED, query)) == expected, query
    shown = text(superuser.get(STAGED))
    assert "waiting for a worker, sent 3 times" in shown
    assert "running on celery@w1 since " in shown
    assert "lost by celery@w1, which started it at " in shown
    assert ", attempt 2, sent 2 times" in shown


def test_the_page_of_a_job(alias, superuser, some):
    def waits_for(task_id: str) -> str:
        job = StagedJob.objects.using(alias).get(task_id=task_id)
        return text(superuser.get(page(job))).partition("What it waits for: ")[2][:60]

    assert waits_for("new").startswith("Waiting for a worker.")
    assert waits_for("long").startswith("Running on celery@w1 since ")
    assert waits_for("again").startswith("Waiting for a worker, sent 3 times.")


def test_the_overview(alias, superuser, some):
    shown = text(superuser.get(OVERVIEW))
    assert "No worker has started 2 sent jobs within their limit." in shown
    assert "Jobs with a receipt, at the workers" in shown
    assert "Waiting for a worker" in shown


def test_an_incident_says_what_to_do(alias, superuser):
    incident = Incident.objects.using(alias).create(kind="no_receipt", first_id=1, last_id=1)
    shown = text(superuser.get(page(incident)))
    assert "No worker has started these jobs within the limit of their receipt" in shown
    assert "Look for workers that are silent or were killed" in shown
