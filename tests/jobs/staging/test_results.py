"""The return values of calls that stage: the same kinds of results that Celery returns."""

from __future__ import annotations

import pytest
from celery import chain, chord, group
from celery.exceptions import TimeoutError
from celery.result import AsyncResult, GroupResult
from django.db import transaction

from outbox_app.models import StagedJob
from tests.jobs.staging import tasks
from tests.patience import patience

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.parametrize("alias", ["default"]),
]


def test_a_task_class_may_have_results_of_its_own(alias, app):
    class Kept(AsyncResult):
        pass

    class Own(app.Task):
        def AsyncResult(self, task_id, **kwargs):
            return Kept(task_id, app=self.app)

    own = app.task(name="own", base=Own, shared=False)(tasks.own)
    with transaction.atomic(using=alias):
        result = own.delay()
        named = own.apply_async(task_id="t-1")

    assert type(result) is Kept
    assert named.id == "t-1"
    job = StagedJob.objects.using(alias).first()
    assert job.task_id == result.id


def test_results_are_of_the_kind_that_celery_returns(alias, app, add):
    with transaction.atomic(using=alias):
        task = add.apply_async((1, 1), ignore_result=True)
        steps = chain(add.s(1, 1), add.s(2), add.s(3)).delay()
        many = group(add.s(1, 1), add.s(2, 2)).delay()
        counted = chord([add.s(1, 1)] * 2, add.s(3)).delay()

    assert type(task) is app.AsyncResult
    assert task.ignored is True
    assert type(steps) is app.AsyncResult
    assert type(steps.parent.parent) is app.AsyncResult
    assert type(many) is app.GroupResult
    assert len(many) == 2
    assert isinstance(counted.parent, GroupResult)


def test_what_was_forgotten_is_not_subscribed_to_when_another_result_is_waited_for(
    alias, make_app, redis_url
):
    app = make_app("memory://", result_backend=redis_url)
    add = app.task(name="add", shared=False)(tasks.add)
    with transaction.atomic(using=alias):
        forgotten, wanted = group(add.s(1, 1), add.s(2, 2)).delay(), add.delay(3, 3)
    forgotten.forget()

    with pytest.raises(TimeoutError):
        wanted.get(timeout=0.01)
    consumer = app.backend.result_consumer
    assert consumer.subscribed_to == {consumer._get_key_for_task(wanted.id)}
    wanted.forget()
    consumer.stop()


def test_a_result_that_came_before_it_was_waited_for_is_one_of_its_group(
    alias, make_app, redis_url
):
    """As where one task is a member of two groups: the first wait has kept what it was told."""
    app = make_app("memory://", result_backend=redis_url)
    add = app.task(name="add", shared=False)(tasks.add)
    with transaction.atomic(using=alias):
        both = group(add.s(1, 1), add.s(2, 2)).delay()
    for number, result in enumerate(both.results):
        told = {"task_id": result.id, "status": "SUCCESS", "result": number, "children": []}
        app.backend._pending_messages.put(result.id, told)

    assert both.join_native(timeout=patience()) == [0, 1]
    app.backend.result_consumer.stop()
