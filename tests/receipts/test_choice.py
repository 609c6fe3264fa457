"""Which jobs have a receipt, and where their calls are staged."""

from __future__ import annotations

from typing import Any

import pytest
from celery import group
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from outbox_app import stage_many
from outbox_app.checks.receipts import check_receipts
from outbox_app.exceptions import InvalidJob
from outbox_app.jobs.drain.drain import Drain
from outbox_app.jobs.staging.receipt import receipt_of
from outbox_app.models import StagedJob

pytestmark = pytest.mark.django_db(transaction=True)
on_sqlite = pytest.mark.parametrize("alias", ["default"], indirect=True)


@pytest.fixture
def app(alias: str, make_app: Any) -> Any:
    return make_app()


@pytest.fixture
def declare(app: Any) -> Any:
    def declare(name: str, **options: Any) -> Any:
        def body(*args: Any) -> None: ...

        return app.task(name=name, shared=False, lazy=False, **options)(body)

    return declare


def receipts(alias: str) -> dict[str, int | None]:
    return dict(StagedJob.objects.using(alias).values_list("task", "receipt"))


@on_sqlite
def test_the_attribute_wins_over_the_patterns(alias, settings, declare):
    patterns = {"a.*": {"limit": 10, "attempts": 2}, "*.b": {"limit": 20}}
    settings.OUTBOX = {**settings.OUTBOX, "RECEIPTS": patterns}
    assert receipt_of(None, "a.b") == (10, 2)
    assert receipt_of(None, "c.b") == (20, 5)
    assert receipt_of(None, "c") is None
    assert receipt_of(declare("a.own", receipt=30), "a.own") == (30, 2)
    assert receipt_of(declare("a.none", receipt=0), "a.none") is None


@on_sqlite
@pytest.mark.parametrize("value", [True, -1, "60", 1.5, 10**9])
def test_a_wrong_attribute_is_refused_where_the_task_is_called(alias, declare, value):
    task = declare("work", receipt=value)
    with transaction.atomic(using=alias):
        with pytest.raises(InvalidJob, match=r"receipt of work is .*expected seconds"):
            task.delay()
        declare("other").delay()
    assert receipts(alias) == {"other": None}


@on_sqlite
def test_a_task_that_no_worker_can_wrap_is_refused(alias, app, declare):
    class Own(app.Task):  # type: ignore[name-defined]
        __trace__ = None

    task = declare("own", base=Own, receipt=60)
    with transaction.atomic(using=alias), pytest.raises(InvalidJob, match="its own __trace__"):
        task.delay()
    assert "outbox.E050" in {each.id for each in check_receipts()}


@on_sqlite
def test_the_check_names_tasks_that_celery_fails_when_a_worker_is_lost(alias, declare):
    declare("early", receipt=60)
    declare("late", receipt=60, acks_late=True, reject_on_worker_lost=True)
    declare("without")
    [found] = [each for each in check_receipts() if "early" in each.msg]
    assert found.id == "outbox.W054"
    assert ": early." in found.msg


def test_outside_a_transaction_it_is_staged_and_others_are_sent(alias, declare):
    declare("work", receipt=60).delay()
    declare("sent").delay()
    assert receipts(alias) == {"work": 60}


def test_a_group_outside_a_transaction(alias, declare):
    work, sent = declare("work", receipt=60), declare("sent")
    group(work.s(), sent.s())()
    assert receipts(alias) == {"work": 60}


def test_in_bulk(alias, declare):
    """The third job of a kind is made from a template, and PostgreSQL takes ten rows by COPY."""
    work, other = declare("work", receipt=60), declare("other")
    with transaction.atomic(using=alias):
        stage_many([*(work.s(n) for n in range(12)), *(other.s(n) for n in range(12))], using=alias)
    rows = StagedJob.objects.using(alias).values_list("task", "receipt")
    assert sorted(rows) == [("other", None)] * 12 + [("work", 60)] * 12


def test_jobs_without_one_take_the_statements_that_they_took(alias, declare):
    """No column of a receipt is written, and none is compared."""
    task = declare("work")
    with CaptureQueriesContext(connections[alias]) as captured:
        with transaction.atomic(using=alias):
            task.delay()
        with transaction.atomic(using=alias):
            group(task.s() for _ in range(3))()
        assert Drain(using=alias).run(once=True).published == 4
    written = [q["sql"] for q in captured if "outbox_stagedjob" in q["sql"].lower()]
    written = [sql for sql in written if not sql.lstrip("( ").startswith("SELECT")]
    assert len(written) == 3  # two INSERTs and the DELETE of the batch
    assert not [sql for sql in written if "receipt" in sql or "sent_at" in sql]
    assert "outbox_run" not in "".join(q["sql"] for q in captured)
