"""Projects' extensions of Celery work with an OutboxCelery as they do with Celery.

The extensions are subclasses of the app, overridden tasks, custom result backends, stamps of any
name, and processes without Django.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import uuid
from unittest.mock import Mock

import pytest
from celery import Celery, chain, group, states
from celery.backends.base import Backend
from celery.canvas import StampingVisitor
from celery.contrib.django.task import DjangoTask
from django.db import connections, transaction
from django.utils import timezone

from outbox_app import stage
from outbox_app.celery import OutboxCelery, OutboxTask
from outbox_app.jobs.staging.sending import StagingMixin
from outbox_app.models import StagedJob
from tests.jobs.staging import message_equality, tasks
from tests.jobs.staging.transactions import rolled_back

pytestmark = pytest.mark.django_db(transaction=True, databases=["default"])
#: Where what is tested does not depend on the database, and nothing is looked up there.
on_sqlite = pytest.mark.parametrize("alias", ["default"], indirect=True)


class FewByPosition(Celery):
    """As in tenant-schemas-celery."""

    def send_task(self, name, args=None, kwargs=None, **options):
        options["headers"] = {**(options.get("headers") or {}), "_schema_name": "tenant"}
        return super().send_task(name, args=args, kwargs=kwargs, **options)


class WithPrefix(Celery):
    """Passes on what it was given, and another name."""

    def send_task(self, name, *args, **kwargs):
        return super().send_task(f"shop.{name}", *args, **kwargs)


CLASSES = {
    cls.__name__: (cls, type("Staging", (StagingMixin, cls), {"task_cls": OutboxTask}))
    for cls in (FewByPosition, WithPrefix)
}
AT = "3f0e3c5e-0000-4000-8000-c0ffee000001"
CALLS = {
    "delay": lambda t: t.add.delay(2, 2),
    "apply_async": lambda t: t.add.apply_async((2, 2), countdown=100, headers={"h": 1}),
    "send_task": lambda t: t.app.send_task("elsewhere", (1,), {"k": 2}),
    "send_task by name": lambda t: t.app.send_task("elsewhere", args=(1,), kwargs={"k": 2}),
    "chain": lambda t: chain(t.add.s(2, 2), t.double.s()).delay(),
    "group": lambda t: group(t.add.s(2, 2), t.double.s(1)).delay(),
}


@pytest.mark.parametrize("send", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("classes", CLASSES.values(), ids=CLASSES)
def test_an_app_class_that_overrides_send_task(classes, send, assert_equal):
    assert_equal(send, classes=classes)


@on_sqlite
def test_an_app_class_that_sends_nothing(alias):
    class Muted(Celery):
        def send_task(self, name, *args, **options):
            return None

    staging = type("Staging", (StagingMixin, Muted), {})
    with staging("muted", set_as_current=False) as app, transaction.atomic(using=alias):
        assert app.send_task("elsewhere") is None


@pytest.mark.parametrize(
    "count", range(9), ids=["name", "args", "kwargs", "countdown", "eta", "task_id", "6", "7", "8"]
)
def test_send_task_with_any_number_of_arguments_by_position(count, assert_equal):
    arguments = ("elsewhere", (1,), {"k": 2}, 100, None, AT, None, None, None)
    assert_equal(lambda t: t.app.send_task(*arguments[: count + 1]))


@on_sqlite
def test_an_argument_given_twice_is_celerys_error(alias, app):
    for arguments in (("add", (1,)), ("add", (1,), None, 5)):
        with transaction.atomic(using=alias), pytest.raises(TypeError, match="multiple values"):
            app.send_task(*arguments, args=(2,), countdown=7)


@pytest.mark.parametrize("form", ["task", "group", "chain"])
def test_stamps_that_are_named_like_the_options_of_staging(form, assert_equal):
    class Stamps(StampingVisitor):
        def on_signature(self, sig, **headers):
            return {
                "using": "mariadb",
                "ordering_key": 17,
                "stamped_headers": ["using", "ordering_key"],
            }

    def send(t):
        signature = {
            "task": t.add.s(1, 2),
            "group": group(t.add.s(1, 2), t.double.s(1)),
            "chain": chain(t.add.s(1, 2), t.double.s()),
        }[form]
        signature.stamp(visitor=Stamps())
        signature.delay()

    for message in assert_equal(send):
        assert message["headers"]["stamps"] == {"ordering_key": 17, "using": "mariadb"}
    assert not StagedJob.objects.exclude(ordering_key="").exists()


#: Options that look odd, and that each broker takes.
ODD = {
    "headers with line breaks": {"headers": {"a": "x\r\ny", "b\n": "\x00"}},
    "priority True": {"priority": True},
    "task_id with control characters": {"task_id": "a\nb\x1b"},
}
#: Options that brokers beside AMQP's take.
LOOSE = {
    "task_id as UUID": {"task_id": uuid.UUID(int=7)},
    "task_id as number": {"task_id": 17},
    "long task_id": {"task_id": "ß" * 255},
    "priority as text": {"priority": "5"},
    "priority out of range": {"priority": 300},
    "priority as nonsense": {"priority": "x"},
    "long reply_to": {"reply_to": "r" * 300},
    "reply_to as UUID": {"reply_to": uuid.UUID(int=7)},
    "header's key as number": {"headers": {1: "x"}},
    "long header's key": {"headers": {"k" * 300: "x"}},
}


@pytest.mark.parametrize("options", ODD.values(), ids=ODD)
def test_odd_options_that_each_broker_takes(options, assert_equal):
    assert_equal(lambda t: t.add.apply_async((1, 2), **options))


@pytest.mark.parametrize("options", LOOSE.values(), ids=LOOSE)
@pytest.mark.parametrize("broker_url", ["redis"], indirect=True)
def test_odd_options_that_redis_takes(options, assert_equal):
    assert_equal(lambda t: t.add.apply_async((1, 2), **options))


@on_sqlite
@pytest.mark.parametrize("v1", [False, True])
def test_an_app_that_stage_was_given_is_pickled_as_before(v1, alias, monkeypatch):
    plain = Celery("pickled", broker="memory://", set_as_current=False)
    monkeypatch.setattr(plain, "_using_v1_reduce", v1)
    with transaction.atomic(using=alias):
        stage("staged", app=plain)
    again = pickle.loads(pickle.dumps(plain))
    assert type(again) is Celery
    assert again.main == "pickled"
    with transaction.atomic(using=alias):
        stage("staged", app=again)
    assert StagedJob.objects.count() == 2
    plain.close()
    again.close()


class Alone(Backend):
    """A result backend that derives from the class Backend, and from nothing beside it."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.kept = {}

    def _store_result(self, task_id, result, state, *args, **kwargs):
        self.kept[task_id] = {"status": state, "result": result}

    def _get_task_meta_for(self, task_id):
        return self.kept.get(task_id, {"status": states.PENDING, "result": None})

    def remove_pending_result(self, result):
        """Celery's results call it when they are collected."""


@on_sqlite
@pytest.mark.parametrize("cls", [Celery, OutboxCelery])
def test_a_result_backend_of_ones_own(cls, alias):
    twin = message_equality.twin(
        cls, "memory://", "alone", now=timezone.now(), result_backend=f"{__name__}:Alone"
    )
    with transaction.atomic(using=alias):
        result = twin.add.delay(1, 2)
        chain(twin.add.s(1, 2), twin.double.s()).delay()
    assert result.state == states.PENDING
    twin.app.backend.store_result(result.id, 3, states.SUCCESS)
    assert twin.app.AsyncResult(result.id).result == 3
    twin.close()


class OwnTask(DjangoTask):
    """A task class that notes what it is called with."""

    def delay(self, *args, **kwargs):
        return super().delay(*args, **kwargs, note="delay")

    def apply_async(self, args=None, kwargs=None, **options):
        return super().apply_async(args, {**(kwargs or {}), "by": "apply_async"}, **options)


@pytest.mark.parametrize("call", ["delay_on_commit", "apply_async_on_commit"])
def test_on_commit_calls_go_through_the_tasks_own_methods(call, assert_equal):
    class Staging(OwnTask, OutboxTask):
        pass

    def app_class(cls, task_cls):
        return type(cls.__name__, (cls,), {"task_cls": task_cls})

    def send(t):
        own = t.app.task(name="own", shared=False)(tasks.anything)
        with transaction.atomic():
            arguments = (1, 2) if call == "delay_on_commit" else ((1, 2),)
            getattr(own, call)(*arguments)

    assert_equal(send, classes=(app_class(Celery, OwnTask), app_class(OutboxCelery, Staging)))


@pytest.mark.parametrize("cls", [Celery, OutboxCelery])
@on_sqlite
def test_on_commit_calls_reach_mocks(cls, alias, monkeypatch):
    twin = message_equality.twin(cls, "memory://", "mocked", now=timezone.now())
    delay, apply_async = Mock(), Mock()
    monkeypatch.setattr(twin.add, "delay", delay, raising=False)
    monkeypatch.setattr(twin.add, "apply_async", apply_async, raising=False)
    with transaction.atomic():
        twin.add.delay_on_commit(1, y=2)
        twin.add.apply_async_on_commit((3, 4), countdown=5)

    delay.assert_called_once_with(1, y=2)
    apply_async.assert_called_once_with((3, 4), countdown=5)
    assert not StagedJob.objects.exists()
    twin.close()


@pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"])
def test_an_eager_task_runs_at_the_commit_and_not_for_a_rollback(alias, make_app, staged):
    app = make_app(task_always_eager=True)
    ran = []

    @app.task(name="note", shared=False)
    def note(number):
        ran.append(number)

    with rolled_back(alias):
        note.delay_on_commit(1)
        note.apply_async_on_commit((2,))
    with transaction.atomic(using=alias):
        note.delay_on_commit(3)
        with rolled_back(alias):
            note.delay_on_commit(4)
        note.apply_async_on_commit((5,), ordering_key="k")
        assert ran == []
        note.delay(6)
        assert ran == [6]  # as with Celery
    note.delay_on_commit(7)

    assert ran == [6, 3, 5, 7]
    assert not staged()
    assert not connections[alias].run_on_commit


WITHOUT_SETUP = """
import os
if "DJANGO_SETTINGS_MODULE" in os.environ:
    from django.conf import settings
    settings.OUTBOX = {{"OUTSIDE": "refuse"}}
from celery import group
from celery.exceptions import TimeoutError
from {module} import {cls} as App

app = App("alone", broker="memory://", backend="cache+memory://")
@app.task
def add(x, y): return x + y

add.delay(1, 2)
add.apply_async((1, 2), countdown=5)
app.send_task("elsewhere")
group(add.s(1, 2), add.s(3, 4)).delay()
(add.s(1, 2) | add.s(3)).delay().parent.state
with app.producer_or_acquire() as producer:
    add.apply_async((5, 6), producer=producer)
try:
    add.apply_async((7, 8), ordering_key="k").get(timeout=0.01)
except TimeoutError as error:
    print(error)
print(app.backend.as_uri())
with app.connection_for_read() as connection:
    queue = app.amqp.default_queue(connection.default_channel)
    queue.declare()
    while (message := queue.get(no_ack=True)) is not None:
        print(message.headers["task"], message.payload[:2])
"""


@pytest.mark.parametrize("settings_module", ["tests.settings", None])
def test_without_django_setup_it_is_sent(settings_module):
    def run(module, cls):
        environ = {k: v for k, v in os.environ.items() if k != "DJANGO_SETTINGS_MODULE"}
        if settings_module:
            environ["DJANGO_SETTINGS_MODULE"] = settings_module
        done = subprocess.run(
            [sys.executable, "-c", WITHOUT_SETUP.format(module=module, cls=cls)],
            env=environ,
            check=False,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    plain = run("celery", "Celery")
    assert plain.count("alone.add") == 7
    assert run("outbox_app.celery", "OutboxCelery") == plain


@on_sqlite
def test_a_registry_of_tasks_that_can_only_be_asked_by_name(alias, app, sent, staged, monkeypatch):
    class Registry:
        def __getitem__(self, name):
            raise KeyError(name)

    monkeypatch.setattr(app, "_tasks", Registry())
    app.send_task("elsewhere", (1, 1))
    with transaction.atomic():
        app.send_task("elsewhere", (2, 2))
    assert (sent(), staged()) == ([[1, 1]], [[2, 2]])
