"""The declared tasks of a model are staged with every change that Django signals, atomically."""

from __future__ import annotations

import pytest
from celery import group
from django.core import serializers
from django.db import connections, models, transaction
from django.db.migrations.state import ModelState
from django.db.transaction import TransactionManagementError
from django.test.utils import CaptureQueriesContext

from outbox_app.exceptions import InvalidJob
from outbox_app.models import StagedJob
from outbox_app.testing import assert_staged, staged_jobs
from tests.mixin.models import Diner, Letter, Line, Order, Place, Quiet, Restaurant, Venue, Wrong


def test_create_update_and_delete(alias, staged):
    order = Order.objects.using(alias).create()
    pk = order.pk
    assert staged() == [("mixin.created", [pk])]

    order.save()
    assert len(staged()) == 1, "the condition of on_update holds"
    order.paid = True
    order.save()
    assert staged()[1:] == [("mixin.updated", [pk])]

    order.delete()
    assert staged()[2:] == [("mixin.deleted", [pk])]


@pytest.mark.django_db(transaction=True)
def test_row_and_job_are_one_transaction_without_atomic(alias, staged):
    order = Order.objects.using(alias).create()
    assert staged() == [("mixin.created", [order.pk])]

    with pytest.raises(InvalidJob, match="on_create"):
        Wrong.objects.using(alias).create()
    assert not Wrong.objects.using(alias).exists()
    assert len(staged()) == 1


@pytest.mark.django_db(transaction=True)
def test_job_is_rolled_back_with_the_row(alias, staged):
    with transaction.atomic(using=alias):
        Order.objects.using(alias).create()
        assert len(staged()) == 1
        transaction.set_rollback(True, using=alias)

    assert not Order.objects.using(alias).exists()
    assert not staged()


@pytest.mark.django_db(transaction=True)
def test_caller_who_goes_on_cannot_commit_the_row_without_its_job(alias, staged):
    with transaction.atomic(using=alias):
        with pytest.raises(InvalidJob):
            Wrong.objects.using(alias).create()
        with pytest.raises(TransactionManagementError):
            Order.objects.using(alias).count()
    assert not Wrong.objects.using(alias).exists()

    with transaction.atomic(using=alias):
        with pytest.raises(InvalidJob), transaction.atomic(using=alias):
            Wrong.objects.using(alias).create()
        order = Order.objects.using(alias).create()
    assert not Wrong.objects.using(alias).exists()
    assert staged() == [("mixin.created", [order.pk])]


def test_save_costs_one_statement_more(alias, app):
    letter = Letter(text="abc")
    with CaptureQueriesContext(connections[alias]) as queries:
        letter.save(using=alias)
    assert len(queries) == 2, "two jobs, one INSERT"
    assert StagedJob.objects.using(alias).count() == 2


def test_queryset_delete_and_cascade(alias, staged):
    orders = [Order.objects.using(alias).create() for _ in range(3)]
    line = Line.objects.using(alias).create(order=orders[0])
    pks = [order.pk for order in orders]
    StagedJob.objects.using(alias).all().delete()

    Order.objects.using(alias).filter(pk__in=pks[1:]).delete()
    assert sorted(staged()) == [("mixin.deleted", [pk]) for pk in pks[1:]]
    StagedJob.objects.using(alias).all().delete()

    line_pk = line.pk
    orders[0].delete()
    assert sorted(staged()) == sorted([("mixin.deleted", [line_pk]), ("mixin.deleted", [pks[0]])])


def test_what_is_declared_is_staged_in_any_mode(alias, app, settings):
    settings.OUTBOX = {**settings.OUTBOX, "TASK_MODES": {"*": "send"}}
    order = Order.objects.using(alias).create()
    assert_staged("mixin.created", args=[order.pk])


def test_fixtures_stage_nothing(alias, staged):
    text = serializers.serialize("json", [Order(pk=7, paid=True), Place(pk=8, name="x")])
    for deserialized in serializers.deserialize("json", text, using=alias):
        deserialized.save(using=alias)

    assert Order.objects.using(alias).get().pk == 7
    assert staged() == []


def test_update_fields_force_insert_and_deferred_fields(alias, staged):
    order = Order(paid=True)
    order.save(using=alias, force_insert=True)
    order.save(update_fields=["note"])
    order.save(update_fields=[])
    Order.objects.using(alias).only("id").get().save()

    assert [task for task, _ in staged()] == ["mixin.created", "mixin.updated", "mixin.updated"]


def test_instance_decides_on_the_alias(alias, app, settings):
    settings.OUTBOX = {"DATABASE": "nowhere"}
    with transaction.atomic(using=alias):
        order = Order.objects.using(alias).create(paid=True)
        order.stage("mixin.created")
        order.save()
        order.delete()
    assert StagedJob.objects.using(alias).count() == 4


def test_named_task_keeps_the_options_of_its_decorator(alias, app):
    order = Order.objects.using(alias).create(paid=True)
    order.save()
    jobs = staged_jobs(using=alias)
    assert [job.headers["timelimit"][0] for job in jobs] == [None, 7]


def test_ordered_jobs_of_a_row_have_one_key(alias, app):
    order = Order.objects.using(alias).create(paid=True)
    order.save()
    key = f"mixin.order:{order.pk}"
    order.delete()
    assert [job.ordering_key for job in staged_jobs(using=alias)] == ["", key, key]


def test_signatures_get_the_key_and_callables_the_instance(alias, staged, app):
    letter = Letter.objects.using(alias).create(text="ab")
    first, step = staged_jobs(using=alias)
    assert (first.args, first.kwargs, first.queue) == ([letter.pk], {"kind": "letter"}, "letters")
    assert (step.task, step.args) == ("mixin.created", [letter.pk])
    assert [s["task"] for s in step.request["chain"]] == ["mixin.updated"]

    letter.save()
    assert staged()[2:] == [("mixin.updated", [args]) for args in ("ab", "a", "b")]


def test_signature_makes_new_jobs_each_time(alias, app):
    for _ in range(2):
        Letter.objects.using(alias).create()
    jobs = staged_jobs(using=alias)
    steps = [step["options"]["task_id"] for job in jobs for step in job.request["chain"] or ()]
    ids = [job.task_id for job in jobs] + steps
    assert len(steps) == 2
    assert len(set(ids)) == 6


def test_abstract_and_proxy_models_inherit(alias, staged):
    venue = Venue.objects.using(alias).create(name="x")
    place = Place.objects.using(alias).get()
    venue.delete()
    assert staged() == [("mixin.created", [place.pk]), ("mixin.deleted", [place.pk])]
    assert {job.ordering_key for job in staged_jobs(using=alias)} == {f"mixin.place:{place.pk}"}


def test_row_of_several_tables_is_one_row(alias, staged):
    diner = Diner.objects.using(alias).create(name="x")
    pk = diner.pk
    assert staged() == [("mixin.created", [pk])]

    Restaurant.objects.using(alias).get().delete(keep_parents=True)
    assert staged()[1:] == [("mixin.closed", [pk])], "the place is there"

    Place.objects.using(alias).get().delete()
    assert staged()[2:] == [("mixin.deleted", [pk])]
    keys = {job.ordering_key for job in staged_jobs(using=alias)}
    assert keys == {f"mixin.place:{pk}", ""}


def test_deleting_a_child_deletes_its_parent_once(alias, staged):
    diner = Diner.objects.using(alias).create(name="x")
    pk = diner.pk
    diner.delete()
    assert sorted(staged()[1:]) == [("mixin.closed", [pk]), ("mixin.deleted", [pk])]


def test_model_without_declarations_costs_nothing(alias, django_assert_num_queries):
    quiet = Quiet()
    with django_assert_num_queries(1, connection=connections[alias]):
        quiet.save(using=alias)
    with django_assert_num_queries(1, connection=connections[alias]):
        Quiet.objects.using(alias).all().delete()


def test_mixin_leaves_no_trace_in_migrations():
    """A class in ``bases`` could never move again, and data migrations would stage jobs."""
    state = ModelState.from_model(Order)
    assert state.bases == (models.Model,)
    assert set(state.fields) == {"id", "paid", "note"}


@pytest.mark.usefixtures("in_atomic")
def test_stage(alias, app):
    order = Order.objects.using(alias).create()
    StagedJob.objects.using(alias).all().delete()

    order.stage("mixin.updated", [order.pk], {"kind": "x"}, ordered=True, queue="q")
    order.stage(group(app.signature("mixin.created", args=[i]) for i in range(2)))

    job, *rest = staged_jobs(using=alias)
    assert (job.task, job.args, job.kwargs) == ("mixin.updated", [order.pk], {"kind": "x"})
    assert (job.ordering_key, job.queue) == (f"mixin.order:{order.pk}", "q")
    assert [(job.task, job.args, job.ordering_key) for job in rest] == [
        ("mixin.created", [0], ""),
        ("mixin.created", [1], ""),
    ]


def test_order_needs_a_primary_key(alias, app):
    with pytest.raises(InvalidJob, match=r"mixin\.Order has no primary key"):
        Order().stage("mixin.created", ordered=True, using=alias)
    assert not StagedJob.objects.using(alias).exists()
