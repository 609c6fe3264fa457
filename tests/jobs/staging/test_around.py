"""What surrounds a call: blocks inside each other set parts of it, and leave the others."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
from celery.signals import after_task_publish, before_task_publish
from django.db import transaction

from outbox_app import stage
from outbox_app.jobs.drain.drain import Drain
from outbox_app.jobs.staging.calls import Around, around, force_staging, surrounded
from outbox_app.jobs.staging.producer import PAIRED
from outbox_app.models import StagedJob

pytestmark = pytest.mark.django_db(transaction=True)
on_sqlite = pytest.mark.parametrize("alias", ["default"])


@pytest.fixture
def on_publish():
    """``on_publish(receiver)``: call it with each task that is published, until the test ends."""
    connected = []

    def connect(receiver, signal=before_task_publish):
        signal.connect(receiver)
        connected.append((signal, receiver))

    yield connect
    for signal, receiver in connected:
        signal.disconnect(receiver)


def test_each_block_sets_a_part():
    with force_staging(using="a", ordering_key="k", immediate=True):
        with surrounded(is_replacing=True), surrounded(staged="t"):
            assert around.get() == Around("a", "k", True, True, False, "t")
            with force_staging(using="b"):
                assert around.get() == Around("b", "", None, True, False, "t")
            with ThreadPoolExecutor(1) as pool:
                assert pool.submit(around.get).result() == Around()
        assert around.get() == Around("a", "k", True)
    assert around.get() == Around()


@on_sqlite
def test_a_call_inside_a_call(alias, app, add, staged, on_publish):
    """The inner call has a key of its own; a savepoint that is rolled back takes no other row."""
    other = app.signature("other", (0, 0))
    seen = []

    def receiver(sender, **kwargs):
        seen.append(around.get())
        if sender == "add":
            with transaction.atomic(using=alias):
                stage(other, using=alias, ordering_key="inner")
            with transaction.atomic(using=alias):
                other.delay()
                transaction.set_rollback(True, using=alias)
            seen.append(around.get())

    on_publish(receiver)
    with transaction.atomic(using=alias):
        stage(add, (1, 1), using=alias, ordering_key="outer")
    outer = Around(alias, "outer", None, staged="add")
    inner = Around(alias, "inner", None, staged="other")
    assert seen == [outer, inner, outer._replace(staged="other"), outer]
    jobs = StagedJob.objects.using(alias).order_by("task")
    assert list(jobs.values_list("task", "ordering_key")) == [("add", "outer"), ("other", "inner")]


@on_sqlite
def test_receivers_of_another_signal_and_of_no_sender_are_all_called(alias, add, on_publish):
    """Only the publish of the task that is staged is left to the drain."""
    heard = []

    def paired(sender, **kwargs):
        heard.append(("paired", sender))

    def other(sender, **kwargs):
        heard.append(("other", sender))

    def receiver(sender, **kwargs):
        for each in (None, "", "another"):
            after_task_publish.send(sender=each)

    paired.__module__ = PAIRED[0]
    for each in (paired, other):
        on_publish(each, after_task_publish)
    on_publish(receiver)
    with transaction.atomic(using=alias):
        add.delay(1, 1)
    assert sorted(heard[:-1], key=str) == sorted(
        [(kind, each) for kind in ("paired", "other") for each in (None, "", "another")], key=str
    )
    assert heard[-1] == ("paired", "add")


@on_sqlite
def test_a_job_that_leaves_inside_the_call_that_stages_it(alias, add, on_publish, settings):
    """With OUTSIDE = "stage" its transaction ends, and it is published, before the call does."""
    settings.OUTBOX = {**settings.OUTBOX, "OUTSIDE": "stage", "IMMEDIATE": True}
    heard = []

    def paired(sender, **kwargs):
        heard.append("paired")

    def other(sender, **kwargs):
        heard.append("other")
        assert around.get() == Around(drained="add")

    paired.__module__ = PAIRED[0]
    for each in (paired, other):
        on_publish(each, after_task_publish)
    add.delay(1, 1)
    assert sorted(heard) == ["other", "paired"]
    assert not StagedJob.objects.using(alias).exists()
    assert around.get() == Around()
    assert Drain(using=alias).run(once=True).published == 0
