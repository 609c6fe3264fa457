"""A task that fails leaves neither effects nor an id, so its next delivery is executed."""

from __future__ import annotations

import json
from contextlib import nullcontext

import pytest
from celery.exceptions import Ignore, Reject, Retry, SoftTimeLimitExceeded
from django.contrib.auth.models import Group
from django.db import IntegrityError, transaction

from outbox_app import idempotent
from outbox_app.exceptions import InboxError
from outbox_app.models import StagedJob
from tests.celery_worker import received
from tests.jobs.inbox.worker import deliver, effect

pytestmark = pytest.mark.django_db


@pytest.mark.parametrize(
    ("error", "state"),
    [
        (ZeroDivisionError(), "FAILURE"),
        (SoftTimeLimitExceeded(), "FAILURE"),
        (Ignore(), "IGNORED"),
        (Reject("later", requeue=True), "REJECTED"),
        (Retry("later"), "RETRY"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Exception) else None,
)
def test_a_task_that_raises_leaves_nothing(task, effects, noted, error, state):
    errors = [error]

    @task
    @idempotent
    def work():
        effect("work")
        if errors:
            raise errors.pop()
        return "done"

    assert deliver(work, "job").state == state
    assert (effects(), noted()) == ([], [])
    assert deliver(work, "job").value == "done"
    assert deliver(work, "job").value == "done"
    assert (effects(), noted()) == (["work"], ["job"])


@pytest.mark.parametrize("leaving", [SystemExit, KeyboardInterrupt])
def test_a_worker_that_is_told_to_stop_leaves_nothing(task, effects, noted, leaving):
    @task
    @idempotent
    def work():
        effect("work")
        raise leaving

    with pytest.raises(leaving):
        deliver(work, "job")
    assert (effects(), noted()) == ([], [])


def test_retry_is_sent_not_staged_and_the_same_job(alias, app, task, effects, noted):
    @task(bind=True)
    @idempotent
    def work(self, label):
        effect(label)
        if not self.request.retries:
            raise self.retry(countdown=0)
        return "done"

    assert deliver(work, "job", "work").state == "RETRY"

    assert (effects(), noted()) == ([], [])
    assert not StagedJob.objects.using(alias).exists()
    [message] = received(app)
    assert (message.headers["id"], message.headers["retries"]) == ("job", 1)
    assert deliver(work, "job", *json.loads(message.body)[0], retries=1).value == "done"
    assert deliver(work, "job", *json.loads(message.body)[0], retries=1).value == "done"
    assert (effects(), noted()) == (["work"], ["job"])


def test_replace_is_sent_not_staged_and_the_replacement_has_the_id(
    alias, app, task, effects, noted
):
    @task
    @idempotent
    def second():
        return effect("second")

    @task(bind=True)
    @idempotent
    def first(self):
        effect("first")
        raise self.replace(second.s())

    assert deliver(first, "job").state == "IGNORED"

    assert (effects(), noted()) == ([], [])
    assert not StagedJob.objects.using(alias).exists()
    [message] = received(app)
    assert (message.headers["id"], message.headers["task"]) == ("job", second.name)
    done = deliver(second, "job").value
    assert deliver(second, "job").value == done
    # The first message arrives once more: what it was replaced with has done the job.
    assert deliver(first, "job").value == done
    assert (effects(), noted()) == (["second"], ["job"])


def test_a_database_error_that_the_task_caught_does_not_look_like_success(
    alias, task, effects, noted
):
    """Django rolls such a transaction back in silence."""

    @task
    @idempotent
    def work(careful):
        name = effect("work")
        try:
            with transaction.atomic(using=alias) if careful else nullcontext():
                Group.objects.using(alias).create(name=name)
        except IntegrityError:
            return

    assert deliver(work, "job", True).state == "SUCCESS"
    assert (effects(), noted()) == (["work"], ["job"])

    with pytest.raises(InboxError, match="caught an error of the database"):
        raise deliver(work, "other", False).value
    assert (effects(), noted()) == (["work"], ["job"])


def test_a_durable_block_in_the_task_is_refused(alias, task, effects, noted):
    """It would promise a commit of its own. The page of idempotent tasks names the way out."""

    @task
    @idempotent
    def work():
        effect("before")
        with transaction.atomic(using=alias, durable=True):
            effect("inside")

    error = deliver(work, "job").value
    assert isinstance(error, RuntimeError)
    assert "durable atomic block" in str(error)
    assert (effects(), noted()) == ([], [])
