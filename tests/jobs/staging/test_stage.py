"""``stage()`` and ``stage_many()``: by name, by signature, with any Celery app, all or nothing."""

from __future__ import annotations

from functools import partial

import celery
import pytest
from celery import Celery, chain, chord, group, shared_task
from celery.result import GroupResult
from django.db import transaction
from django.utils import timezone

from outbox_app import stage, stage_many
from outbox_app.exceptions import InvalidJob, NotAtomic
from outbox_app.models import StagedJob
from tests.jobs.staging import tasks

pytestmark = pytest.mark.django_db(transaction=True)
on_sqlite = pytest.mark.parametrize("alias", ["default"])


def test_what_a_plain_app_is_given_is_staged_and_its_own_calls_go_on_sending(
    alias, plain, plain_add, staged, sent_by
):
    with transaction.atomic(using=alias):
        stage(plain_add, (1, 1))
        stage(plain_add.s(2), kwargs={"y": 2})
        stage("elsewhere", (3,), app=plain)
        plain_add.delay(4, 4)
        (plain_add.s(5, 5) | plain_add.s(6)).delay()
        group(plain_add.s(7, 7), plain_add.s(8, 8)).delay()

        assert staged() == [[1, 1], [2], [3]]
        assert sent_by(plain) == [[4, 4], [5, 5], [7, 7], [8, 8]]
    assert [job.app for job in StagedJob.objects.using(alias).all()] == ["plain"] * 3


CANVAS = {
    "chain": (lambda add: chain(add.s(1, 1), add.s(2)), 1),
    "group": (lambda add: group(add.s(1, 1), add.s(2, 2)), 2),
    "group in a chain": (lambda add: group(add.s(1, 1), add.s(2, 2)) | add.s(3), 2),
    "chord": (lambda add: chord([add.s(1, 1)] * 3, add.s(3)), 3),
    "map": (lambda add: add.starmap([(1, 1), (2, 2)]), 1),
    "chunks": (lambda add: add.chunks([(1, 1), (2, 2)], 1).group(), 2),
}


@pytest.mark.parametrize(("canvas", "count"), CANVAS.values(), ids=CANVAS)
@pytest.mark.parametrize("of_a_plain_app", [True, False])
@on_sqlite
def test_a_canvas_is_staged_with_its_options(
    canvas, count, of_a_plain_app, alias, plain, plain_add, app, add, staged, sent_by
):
    with transaction.atomic(using=alias):
        stage(canvas(plain_add if of_a_plain_app else add), ordering_key="k", priority=3)

    jobs = StagedJob.objects.using(alias).all()
    assert len(jobs) == count
    assert {job.ordering_key for job in jobs} == {"k"}
    assert not sent_by(plain)
    assert not sent_by(app)


@on_sqlite
def test_a_shared_task_and_a_proxy_of_the_app_will_do(alias, plain, staged):
    plain.set_current()
    try:
        shared = shared_task(name="intake.shared")(tasks.add)
        with transaction.atomic(using=alias):
            stage("elsewhere", (1,), app=celery.current_app)
            stage("elsewhere", (2,))
            stage(shared, (3, 3))
            stage(shared.s(4, 4))
    finally:
        celery._state._set_current_app(None)

    assert staged() == [[1], [2], [3, 3], [4, 4]]
    assert {job.app for job in StagedJob.objects.using(alias)} == {"plain"}


@on_sqlite
def test_the_results_are_celerys(alias, app, add):
    with transaction.atomic(using=alias):
        task = stage(add, (1, 1), task_id="mine")
        many = stage(group(add.s(1, 1), add.s(2, 2)))

    assert type(task) is app.AsyncResult
    assert task.id == "mine"
    assert isinstance(many, GroupResult)


@on_sqlite
def test_what_is_no_task_is_refused(alias, staged):
    with transaction.atomic(using=alias), pytest.raises(InvalidJob, match="takes a Celery task"):
        stage(tasks.add, (1, 1))
    assert not staged()


@pytest.mark.parametrize("outside", ["send", "refuse"])
@on_sqlite
def test_outside_a_transaction_it_is_refused(outside, alias, add, staged, sent, settings):
    settings.OUTBOX = {**settings.OUTBOX, "OUTSIDE": outside}
    for call in (partial(stage, add, (1, 1)), partial(stage_many, [add.s(1, 1)])):
        with pytest.raises(NotAtomic, match="outside a transaction on 'default'"):
            call()

    assert not staged()
    assert not sent()


@on_sqlite
def test_outside_a_transaction_it_opens_one_where_the_setting_says_so(alias, add, staged, settings):
    settings.OUTBOX = {**settings.OUTBOX, "OUTSIDE": "stage"}

    stage(add, (1, 1))
    assert stage_many(add.s(i, i) for i in range(2, 4)) == 2
    with pytest.raises(InvalidJob):
        stage_many([add.s(4, 4), add.s(5, 5).set(queue="amq.x")])

    assert staged() == [[1, 1], [2, 2], [3, 3]]


@pytest.mark.parametrize("alias", ["postgres"])
@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
def test_using_names_the_alias(alias, add, staged):
    with transaction.atomic(using=alias):
        stage(add, (1, 1), using=alias)
        stage(group(add.s(2, 2), add.s(3, 3)), using=alias)
        stage_many([add.s(4, 4)], using=alias)
        with pytest.raises(NotAtomic, match="transaction on 'default'"):
            stage(add, (5, 5))
        with pytest.raises(NotAtomic, match=r"atomic\(using='postgres'\).*staged on 'default'"):
            stage(add.s(6, 6).set(using="default"), using=alias)
    assert staged() == [[1, 1], [2, 2], [3, 3], [4, 4]]
    assert not StagedJob.objects.using("default").exists()


@on_sqlite
def test_a_task_of_another_app_in_a_canvas_is_refused(alias, plain, plain_add, make_app, staged):
    other = Celery("other", broker="memory://", set_as_current=False)
    foreign = other.task(name="foreign", shared=False)(tasks.add)
    with (
        transaction.atomic(using=alias),
        pytest.raises(NotAtomic, match="app 'plain' with a task of another app"),
    ):
        stage(group(plain_add.s(1, 1), foreign.s(2, 2)))
    other.close()

    assert not staged()


@on_sqlite
def test_what_is_due_beyond_the_horizon_is_held(alias, app, add, settings):
    settings.OUTBOX = {**settings.OUTBOX, "HOLD_HORIZON": 60}
    with transaction.atomic(using=alias):
        for seconds in (59, 61):
            add.apply_async((1, 1), countdown=seconds, headers={"trace": "1"})

    near, far = StagedJob.objects.using(alias).order_by("id")
    assert near.available_at is None
    assert far.available_at > timezone.now()


@on_sqlite
@pytest.mark.parametrize("of", ["an outbox app", "a plain app"])
def test_task_protocol_1_is_refused(of, alias, add, plain_add, staged):
    """Its eta is in the body: a job that is due in a month would leave at once."""
    task = add if of == "an outbox app" else plain_add
    task.app.conf.task_protocol = 1
    with transaction.atomic(using=alias):
        with pytest.raises(InvalidJob, match=r"task_protocol = 1 .*\(add\)\. Set"):
            stage(task, (2, 2), countdown=86400)
        assert not staged()


@on_sqlite
def test_eager_tasks_run_at_once(alias, app, add, staged):
    app.conf.task_always_eager = True
    with transaction.atomic(using=alias):
        assert stage(add, (1, 2)).get() == 3
        assert stage(group(add.s(1, 1), add.s(2, 2))).get() == [2, 4]
    assert not staged()
