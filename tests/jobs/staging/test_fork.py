"""A child that is forked while threads of its parent stage: it waits for none of them."""

from __future__ import annotations

import multiprocessing
import sys
import threading
from contextlib import ExitStack
from functools import wraps
from inspect import getclosurevars

import pytest
from celery import group
from celery.signals import before_task_publish
from celery.utils import nodenames
from celery.utils.nodenames import gethostname
from django.db import connections, transaction
from kombu.utils.objects import cached_property

from outbox_app.events import publish
from outbox_app.events.signals import events_published
from outbox_app.jobs.staging import sending
from outbox_app.models import StagedJob
from outbox_app.signals import jobs_staged
from tests.patience import patience

pytestmark = pytest.mark.django_db(transaction=True)
SIGNALS = [before_task_publish, jobs_staged, events_published]


@pytest.fixture
def add(make_app):
    @make_app().task(name="tests.fork.add")
    def add(a, b): ...

    return add


@pytest.fixture
def heard():
    """Each signal has a receiver, without which it takes no lock."""

    def receive(**sent): ...

    for each in SIGNALS:
        each.connect(receive)
    yield
    for each in SIGNALS:
        each.disconnect(receive)


def stage(add, alias):
    with transaction.atomic(using=alias):
        add.delay(1, 2)
        group(add.s(1, 2) | add.s(3), add.s(4, 5)).delay()
        publish("order-1", "order.paid", using=alias)
        # As a model does that declares a task of another service by its name.
        assert sending.task_named("another.service", add.app) == "another.service"
        assert StagedJob.objects.using(alias).count() == 3
        transaction.set_rollback(True, using=alias)


def properties(call, monkeypatch):
    """Return the locks of the properties that a call reads."""
    read, get = set(), cached_property.__get__

    def noted(self, instance, owner=None):
        read.add(self)
        return get(self, instance, owner)

    with monkeypatch.context() as patch:
        patch.setattr(cached_property, "__get__", noted)
        call()
    names = {each.attrname for each in read}
    assert {"amqp", "send_task_message", "tasks"} <= names
    return [each.lock for each in read]


def test_what_others_leave_in_modules_of_celery_hinders_no_child(monkeypatch):
    """A module that must not be imported, and a wrapper with the attributes of what it wraps."""
    monkeypatch.setitem(sys.modules, "celery.absent", None)
    monkeypatch.setattr(nodenames, "gethostname", wraps(gethostname)(lambda: "host"))
    sending._renew_locks()  # a child would only print an error, with some locks renewed


@pytest.mark.parametrize("held", ["properties", "signals", "hostname", "tasks"])
@pytest.mark.usefixtures("heard")
def test_a_child_waits_for_no_thread_of_its_parent(alias, add, held, monkeypatch):
    """In an open transaction, with its own rows and those of others locked."""
    stage(add, alias)
    locks = {
        "properties": properties(lambda: stage(add, alias), monkeypatch),
        "signals": [each.lock for each in SIGNALS],
        "hostname": [getclosurevars(gethostname).nonlocals["mutex"]],
        "tasks": [sending._loading],
    }[held]
    ready, go = threading.Barrier(2), threading.Event()

    def hold():
        with ExitStack() as stack:
            for lock in locks:
                stack.enter_context(lock)
            ready.wait(patience())
            go.wait(patience(60))

    thread = threading.Thread(target=hold)
    thread.start()
    child = multiprocessing.get_context("fork").Process(target=stage, args=(add, alias))
    try:
        ready.wait(patience())
        connections.close_all()  # no child may use them
        child.start()
        child.join(patience(10))
        assert child.exitcode == 0
    finally:
        child.kill()
        child.join()
        go.set()
        thread.join()
    stage(add, alias)  # the parent's locks work
