"""Functions that monitoring products wrap: a call passes each one without an error, as in Celery.

New Relic, Sentry and ddtrace replace functions of Celery and kombu by wrappers that take any
exception for a failed send. The tests use similar wrappers.
"""

from __future__ import annotations

import functools

import celery
import kombu
import pytest
from celery import chain, chord, group
from celery.app.amqp import AMQP
from celery.app.task import Task
from celery.signals import after_task_publish, before_task_publish, task_sent
from django.db import transaction
from django.utils import timezone

from outbox_app import stage
from outbox_app.celery import OutboxCelery
from outbox_app.exceptions import InvalidJob
from outbox_app.jobs.staging.producer import StagingProducer
from outbox_app.models import StagedJob
from tests.jobs.staging import message_equality, tasks

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.parametrize("alias", ["default"], indirect=True),
]


@pytest.fixture
def watched(monkeypatch):
    """``watched(owner, name)``: wrap a function. ``watched.calls`` gets a pair for each call."""

    class Watch:
        def __init__(self):
            self.calls = []

        def __call__(self, owner, name):
            inner = getattr(owner, name)

            @functools.wraps(inner)
            def wrapper(*args, **kwargs):
                try:
                    result = inner(*args, **kwargs)
                except BaseException as error:
                    self.calls.append((name, error))
                    raise
                self.calls.append((name, None))
                return result

            monkeypatch.setattr(owner, name, wrapper)

    return Watch()


def watch_all(watched):
    watched(celery.Celery, "send_task")
    watched(Task, "apply_async")
    watched(kombu.Producer, "publish")
    watched(StagingProducer, "_publish")


FORMS = {
    "delay": lambda t: t.add.delay(1, 1),
    "send_task": lambda t: t.app.send_task("add", (1, 1), countdown=5),
    "chain": lambda t: chain(t.add.s(1, 1), t.add.s(2)).delay(),
    "group": lambda t: group(t.add.s(1, 1), t.add.s(2, 2)).delay(),
    "chord": lambda t: chord([t.add.s(1, 1), t.add.s(2, 2)], t.total.s()).delay(),
    "on commit": lambda t: t.add.delay_on_commit(1, 1),
}


@pytest.mark.parametrize("send", FORMS.values(), ids=FORMS)
@pytest.mark.parametrize("events", [False, True], ids=["", "events"])
def test_the_same_calls_pass_as_with_celery_and_none_raises(send, events, alias, watched):
    watch_all(watched)
    options = {"name": "twin", "now": timezone.now(), "result_backend": "cache+memory://"}
    passed = []
    for cls in (celery.Celery, OutboxCelery):
        twin = message_equality.twin(cls, "memory://", **options, task_send_sent_event=events)
        watched(twin.app.amqp, "send_task_message")
        watched.calls.clear()
        with transaction.atomic(using=alias):
            send(twin)
        # The event is the drain's to send; a row needs no socket.
        passed.append([name for name, _ in watched.calls if name != "_publish"])
        assert not [error for _, error in watched.calls if error]
        twin.close()

    plain, staging = passed
    events_of_celery = plain.count("publish") - plain.count("send_task") if events else 0
    assert len(staging) == len(plain) - events_of_celery
    assert [name for name in staging if name != "publish"] == [
        name for name in plain if name != "publish"
    ]


def test_a_wrapper_before_and_one_after_the_first_call_are_both_passed(alias, app, add, watched):
    seen = []

    def wrap():
        inner = app.amqp.send_task_message

        def add_header(producer, name, message, headers=None, **options):
            seen.append(name)
            headers = {**(headers or {}), f"wrapper-{len(seen)}": "was here"}
            return inner(producer, name, message, headers=headers, **options)

        app.amqp.send_task_message = add_header

    wrap()
    with transaction.atomic(using=alias):
        add.delay(1, 1)
        wrap()
        add.delay(2, 2)

    first, second = StagedJob.objects.using(alias).order_by("id")
    assert seen == ["add"] * 3
    assert '"wrapper-1"' in first.envelope
    assert '"wrapper-2"' in second.envelope
    assert '"wrapper-3"' in second.envelope


def test_an_amqp_class_of_the_projects_own_sends(alias, make_app):
    class Own(AMQP):
        def _create_task_sender(self):
            send = super()._create_task_sender()

            def send_task_message(producer, name, message, **options):
                return send(producer, name, message, **{**options, "app_id": "own"})

            return send_task_message

    app = make_app(task_send_sent_event=True)
    app.amqp_cls = Own
    add = app.task(name="add", shared=False)(tasks.add)
    with transaction.atomic(using=alias):
        add.delay(1, 1)

    envelope = StagedJob.objects.using(alias).get().envelope
    assert '"app_id": "own"' in envelope
    assert '"sent_event"' in envelope


def test_what_is_refused_is_an_error_for_them_too(alias, add, watched):
    watch_all(watched)
    with transaction.atomic(using=alias), pytest.raises(InvalidJob) as refused:
        add.apply_async((1, 1), countdown=1e9)

    assert [error for _, error in watched.calls] == [refused.value] * 4


@pytest.fixture
def heard():
    calls = []

    def receiver(signal, sender, **kwargs):
        calls.append((signal.name, sender))

    for signal in (after_task_publish, task_sent):
        signal.connect(receiver)
    yield calls
    for signal in (after_task_publish, task_sent):
        signal.disconnect(receiver)


def test_a_call_inside_one_that_stages_is_heard_of(alias, add, heard):
    """A receiver that sends by another app: what is held back is one task of one call."""
    other = celery.Celery("other", broker="memory://", set_as_current=False)

    def send_another(sender, **kwargs):
        other.send_task("another")

    before_task_publish.connect(send_another, sender="add")
    try:
        with transaction.atomic(using=alias):
            add.delay(1, 1)
    finally:
        before_task_publish.disconnect(send_another, sender="add")
        other.close()
    assert heard == [("after_task_publish", "another"), ("task_sent", "another")]


def test_a_plain_app_that_stages_one_call_goes_on_as_ever(alias, heard):
    plain = celery.Celery("plain", broker="memory://", set_as_current=False)
    plain.send_task("early")  # Celery keeps the signal's method as it was now
    with transaction.atomic(using=alias):
        stage("staged", app=plain)
        plain.send_task("late")
    plain.close()

    assert [task for name, task in heard if name == "after_task_publish"] == ["early", "late"]
