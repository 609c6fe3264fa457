"""Every form of a Celery task can be idempotent. Functions that are not tasks use no job's id."""

from __future__ import annotations

import inspect
import subprocess
import sys
from functools import wraps
from pathlib import Path
from uuid import uuid4

import pytest
from celery import Celery, Task, shared_task
from django.db import connections
from django.db.models.functions import Now

from outbox_app import idempotent
from outbox_app.celery import OutboxCelery
from outbox_app.exceptions import InboxError
from outbox_app.models import InboxEntry
from tests.jobs.inbox.worker import deliver, effect

pytestmark = pytest.mark.django_db


def test_bound(task, twice, effects):
    @task(bind=True)
    @idempotent
    def work(self, label):
        return effect(f"{label}:{self.request.id}")

    first, second = twice(work, "work")

    assert first.value == second.value
    assert len(effects()) == 1


def test_autoretry(task, effects, noted):
    broken = True

    @task(autoretry_for=(ZeroDivisionError,))
    @idempotent
    def work():
        effect("work")
        if broken:
            raise ZeroDivisionError
        return "done"

    assert deliver(work, "job").state == "RETRY"
    assert (effects(), noted()) == ([], [])

    broken = False
    assert deliver(work, "job", retries=1).value == "done"
    assert deliver(work, "job", retries=1).value == "done"
    assert (effects(), noted()) == (["work"], ["job"])


def test_task_class(app, twice, effects):
    class Work(Task):
        name = "work"

        @idempotent
        def run(self, label):
            return effect(f"{label}:{self.name}")

    first, second = twice(app.register_task(Work()), "work")

    assert first.value == second.value
    assert effects() == ["work:work"]


def test_decorators_in_between(task, twice, effects):
    def loudly(function):
        @wraps(function)
        def call(*args):
            return function(*args).upper()

        return call

    @task
    @loudly
    @idempotent
    @loudly
    def work():
        return effect("work")

    first, second = twice(work)

    assert first.value == second.value
    assert len(effects()) == 1


def test_a_tracer_that_replaces_the_body(task, effects, noted):
    """As monitoring agents do, with no respect for ``__wrapped__``."""

    @task
    @idempotent
    def work():
        effect("work")

    body = work.run
    work.run = lambda: body()

    for _ in range(2):
        assert deliver(work, "job").state == "SUCCESS"
    assert (effects(), noted()) == (["work"], ["job"])


@pytest.mark.parametrize("cls", [Celery, OutboxCelery])
def test_shared_task(alias, twice, effects, cls):
    name = f"work-{uuid4()}"

    @shared_task(name=name)
    @idempotent
    def work():
        return effect("work")

    with cls(set_as_current=False, broker="memory://", backend="cache+memory://") as app:
        first, second = twice(app.tasks[name])

    assert first.value == second.value
    assert effects() == ["work"]


@pytest.mark.parametrize("options", [{}, {"bind": True}])
def test_the_task_keeps_its_signature(task, options):
    """Celery checks arguments where a task is called, by the signature of its function."""

    def work(self, x, *, y=2): ...
    def plain(x, *, y=2): ...

    function = work if options else plain
    idempotent_task = task(**options)(idempotent(function))

    assert inspect.signature(idempotent(function)) == inspect.signature(function)
    assert idempotent_task.__name__ == function.__name__
    for arguments in ((), (1, 2)):
        with pytest.raises(TypeError, match="positional argument"):
            idempotent_task.delay(*arguments)
    with pytest.raises(TypeError, match="unexpected keyword argument 'z'"):
        idempotent_task.delay(1, z=3)


def test_called_directly_it_is_a_function_in_a_transaction(alias, task, effects, noted):
    @task
    @idempotent
    def work(fails):
        effect("work")
        assert connections[alias].in_atomic_block
        if fails:
            raise ZeroDivisionError
        return "done"

    assert work(False) == work(False) == work.run(False) == "done"
    with pytest.raises(ZeroDivisionError):
        work(True)
    assert effects() == ["work"] * 3
    assert noted() == []


def test_called_inside_another_task_it_does_not_take_that_ones_id(task, twice, effects, noted):
    @task
    @idempotent
    def inner():
        effect("inner")

    @task
    def outer():
        inner()
        inner()

    @task
    @idempotent
    def idempotent_outer():
        inner()
        inner()

    twice(outer)
    assert effects() == ["inner"] * 4
    assert noted() == []

    deliver(idempotent_outer, "outer")
    deliver(idempotent_outer, "outer")
    assert effects() == ["inner"] * 6
    assert noted() == ["outer"]


def test_a_task_may_call_itself(task, twice, effects):
    @task
    @idempotent
    def countdown(n):
        effect(str(n))
        if n:
            # In a worker Celery takes this for the same request.
            countdown.run(n - 1)
            countdown(n - 1)
        return n

    first, second = twice(countdown, 1)

    assert (first.value, second.value) == (1, 1)
    assert effects() == ["0", "0", "1"]


@pytest.mark.parametrize("kind", ["another task's run()", "a function without a task"])
def test_what_is_not_the_body_of_the_task_is_refused(task, effects, noted, kind):
    @idempotent
    def helper():
        effect("helper")

    other = task(name="other")(helper)

    @task(name="outer")
    def outer():
        if kind == "another task's run()":
            other.run()
        else:
            helper()

    delivery = deliver(outer, "job")

    with pytest.raises(InboxError, match=r"helper was called inside outer\[job\]"):
        raise delivery.value
    assert (effects(), noted()) == ([], [])


def test_eager_calls_are_jobs_too(alias, app, task, effects):
    app.conf.task_always_eager = True

    @task
    @idempotent
    def work():
        return effect("work")

    result = work.delay()
    again = work.apply(task_id=result.id)

    assert again.get() == result.get()
    assert work.delay().get() != result.get()
    assert effects() == ["work", "work"]


def test_an_eager_replacement_stands_in_for_the_task(app, task, effects, noted):
    @task
    @idempotent
    def second():
        return effect("second")

    @task(bind=True)
    @idempotent
    def first(self):
        return self.replace(second.s())

    result = first.apply(task_id="job")

    assert result.get().startswith("second ")
    assert first.apply(task_id="job").get() == result.get()
    assert (effects(), noted()) == (["second"], ["job"])


def test_the_order_of_decorators_is_checked(app, task):
    def work(): ...

    lazy = app.task(shared=False)(work)
    for wrong in (task(work), lazy, shared_task(name=f"work-{uuid4()}")(work), Task()):
        with pytest.raises(TypeError, match="stands above the task decorator"):
            idempotent(wrong)
    with pytest.raises(TypeError, match=r"got 'other'\. An alias goes to using="):
        idempotent("other")


def test_it_can_be_imported_before_django_is_set_up(tmp_path):
    """A project's celery.py, with tasks in it, is imported while Django reads the settings."""
    code = (
        "from outbox_app import idempotent\n"
        "from outbox_app.celery import OutboxCelery\n"
        "app = OutboxCelery('shop')\n"
        "@app.task\n@idempotent\ndef work(): ...\n"
    )
    root = Path(__file__).resolve().parents[3]
    subprocess.run([sys.executable, "-c", code], cwd=root, env={"PATH": "/usr/bin"}, check=True)


def test_the_entry_of_a_long_task_name(alias, app, task):
    @task(name="x" * 300)
    @idempotent
    def work(): ...

    deliver(work, "job")

    assert InboxEntry.objects.using(alias).filter(handled_at__lte=Now()).get().task == "x" * 255
