"""The transaction of a test does not count: calls are sent or refused as in production."""

from __future__ import annotations

import pytest
from celery import chord, group
from django.db import transaction
from django.test import TestCase

from outbox_app import stage, stage_many
from outbox_app.celery import OutboxCelery
from outbox_app.events import publish
from outbox_app.exceptions import NotAtomic
from outbox_app.models import StagedJob
from outbox_app.testing import assert_not_staged, assert_staged, run_staged, staged_jobs
from tests import tasks

FORMS = {
    "delay": lambda add: add.delay(1, 1),
    "group": lambda add: group(add.s(1, 1), add.s(2, 2)).delay(),
    "chord": lambda add: chord([add.s(1, 1), add.s(2, 2)], add.s(3)).delay(),
}


@pytest.fixture
def app(make_app):
    return make_app(result_backend="cache+memory://")


@pytest.mark.parametrize("send", FORMS.values(), ids=FORMS)
def test_refuse_refuses(send, alias, add, settings):
    settings.OUTBOX = {**settings.OUTBOX, "OUTSIDE": "refuse"}
    with pytest.raises(NotAtomic, match="called outside a transaction"):
        send(add)
    assert_not_staged()

    with transaction.atomic(using=alias):
        send(add)
    assert staged_jobs()


def test_publish_and_stage_need_a_transaction_of_the_code(alias, add, settings):
    with pytest.raises(NotAtomic, match=r"publish\(\) was called outside a transaction"):
        publish("order-1", "order.placed", using=alias)
    with pytest.raises(NotAtomic, match=r"stage\(\) was called outside a transaction"):
        stage(add, (1, 1), using=alias)

    settings.OUTBOX = {**settings.OUTBOX, "OUTSIDE": "stage"}
    publish("order-1", "order.placed", using=alias)
    stage(add, (1, 1), using=alias)
    add.delay(2, 2)
    assert_staged(add, count=2)


@pytest.mark.parametrize("send", FORMS.values(), ids=FORMS)
def test_what_production_sends_is_staged_and_not_what_was_expected(send, alias, add):
    send(add)

    count = len(staged_jobs(add))
    assert count
    with pytest.raises(AssertionError, match="called outside a transaction, where production"):
        assert_staged(add, count=count)
    with pytest.raises(AssertionError, match="Expected 0 staged of add"):
        assert_not_staged(add)
    assert len(assert_staged(add, count=count, outside=True)) == count


def test_one_call_of_two_is_named(alias, add):
    with transaction.atomic(using=alias):
        add.delay(1, 1)
    add.delay(2, 2)

    assert_staged(add, args=[1, 1])
    with pytest.raises(AssertionError, match="1 of 2 add called outside a transaction"):
        assert_staged(add, count=2)


def test_an_id_that_was_called_outside_once_counts_anew(alias, add):
    add.apply_async((1, 1), task_id="same")
    StagedJob.objects.using(alias).all().delete()
    with transaction.atomic(using=alias):
        add.apply_async((1, 1), task_id="same")
    assert_staged(add, count=1)


def test_what_a_callback_sends_after_the_commit_shows(alias, add):
    capture = TestCase.captureOnCommitCallbacks(execute=True, using=alias)
    with capture, transaction.atomic(using=alias):
        transaction.on_commit(lambda: add.delay(1, 1), using=alias)

    with pytest.raises(AssertionError, match="outside a transaction"):
        assert_staged(add)
    assert_staged(add, outside=True)


def test_what_a_worker_sends_is_no_call_of_the_code(alias, app):
    @app.task(shared=False, name="fails")
    def fails():
        raise ValueError("on purpose")

    @app.task(shared=False, name="on_error")
    def on_error(task_id): ...

    with transaction.atomic(using=alias):
        fails.apply_async(link_error=on_error.s())
    with pytest.raises(ValueError, match="on purpose"):
        run_staged()
    assert_staged(on_error)


@pytest.mark.django_db(databases=["default", "postgres"])
@pytest.mark.parametrize("alias", ["postgres"], indirect=False)
def test_a_transaction_on_another_alias_only_is_refused_as_in_production(alias, add):
    with transaction.atomic(using=alias), pytest.raises(NotAtomic, match="staged on 'default'"):
        add.delay(1, 1)


class InTestCase(TestCase):
    """The same in Django's own, with what its class sets up."""

    @classmethod
    def setUpTestData(cls):
        cls.app = OutboxCelery("outside", broker="memory://", set_as_current=False)
        cls.addClassCleanup(cls.app.close)

    def test_refused(self):
        with self.settings(OUTBOX={"OUTSIDE": "refuse"}), pytest.raises(NotAtomic):
            self.app.send_task("elsewhere")
        with pytest.raises(NotAtomic):
            publish("order-1", "order.placed")

    def test_durable_blocks_are_of_the_code(self):
        with self.settings(OUTBOX={"OUTSIDE": "refuse"}), transaction.atomic(durable=True):
            self.app.send_task("elsewhere")
            publish("order-1", "order.placed")
        assert_staged("elsewhere")


def test_a_task_that_is_sent_in_any_transaction_is_called_outside(alias, app, settings):
    ping = app.task(name="ping", outbox="send")(tasks.add)
    with transaction.atomic(using=alias):
        ping.delay(1, 1)
    with pytest.raises(AssertionError, match="whose mode is not 'stage'"):
        assert_staged(ping)
    assert_staged(ping, outside=True)
    run_staged()

    with transaction.atomic(using=alias):
        stage(ping, (1, 1), using=alias)
    assert_staged(ping)
    with transaction.atomic(using=alias):
        stage_many([ping.s(2, 2)], using=alias)
    assert_staged(ping, count=2)
