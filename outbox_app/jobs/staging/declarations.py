"""What a model declares: ``outbox = [on_create("shop.tasks.send_receipt"), …]``.

A declaration names the work for a change of a row; ``mixin`` stages it. A task may be given by its
name, which is resolved at the first change: so models need not import tasks that import the models.
The name resolves to the loaded task, with the queue and the other options of its decorator; a task
that the app does not know is staged by name. System checks report wrong declarations.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from threading import RLock
from typing import Any, Literal, TypeAlias
from weakref import WeakSet

from celery import Celery, current_app
from celery.app.task import Task
from celery.canvas import Signature
from django.db import models

from ...exceptions import InvalidJob
from ...text import get_logger

logger = get_logger("outbox_app.staging")

Change = Literal["create", "update", "delete"]
Work: TypeAlias = "Task[Any, Any] | Signature[Any] | str | Callable[[Any], Any]"
When = Callable[[Any], bool]


@dataclass(frozen=True, slots=True, eq=False)
class Declared:
    """One entry of a model's ``outbox``: what is staged when an instance changes."""

    change: Change
    task: Work
    when: When | None
    ordered: bool
    options: dict[str, Any]

    def jobs(self, instance: models.Model) -> Iterator[tuple[Any, Sequence[Any] | None]]:
        """Yield the jobs to stage for an instance, each with the arguments to add."""
        if self.when is not None and not self.when(instance):
            return
        if isinstance(self.task, str | Signature | Task):
            if instance.pk is None:
                raise InvalidJob(
                    f"on_{self.change}() of {instance._meta.label}: a row has no primary key, "
                    "which is the task's argument. Save it first; MySQL returns none from "
                    "bulk_create(): read the rows again."
                )
            task: Any = self.task
            if isinstance(task, str):
                task = task_named(task, self.options.get("app"))
            elif isinstance(task, Signature):
                task = task.clone()  # a chain remembers the ids of its last run
            yield task, (instance.pk,)
        else:
            made = self.task(instance)
            for job in made if isinstance(made, list | tuple) else [made]:
                if isinstance(job, Signature):
                    yield job, None
                elif job is not None:
                    raise InvalidJob(
                        f"on_{self.change}() of {instance._meta.label}: the callable must return a "
                        f"signature, a list of them or None; it returned {job!r}. Write task.s(…)."
                    )


def on_create(
    task: Work, *, when: When | None = None, ordered: bool = False, **options: Any
) -> Declared:
    """Declare the work to stage when a row is created.

    Args:
        task: A task name, a task or a signature, called with the primary key; or a callable that
            takes the instance and returns a signature, a list of them, or None for nothing.
        when: A callable that takes the instance; if it returns False, nothing is staged.
        ordered: The jobs of one row leave in the order in which they were staged.
        **options: Options of ``outbox_app.stage``.
    """
    return Declared("create", task, when, ordered, options)


def on_update(
    task: Work, *, when: When | None = None, ordered: bool = False, **options: Any
) -> Declared:
    """Declare the work to stage when a row is saved again; takes the arguments of ``on_create``."""
    return Declared("update", task, when, ordered, options)


def on_delete(
    task: Work, *, when: When | None = None, ordered: bool = False, **options: Any
) -> Declared:
    """Declare the work to stage when a row is deleted; takes the arguments of ``on_create``."""
    return Declared("delete", task, when, ordered, options)


def declared(model: type[models.Model], *changes: Change) -> list[Declared]:
    """Return a model's declarations for the given changes; leave out anything else."""
    declarations = getattr(model, "outbox", ())
    if not isinstance(declarations, list | tuple):
        return []
    return [d for d in declarations if isinstance(d, Declared) and d.change in changes]


def task_named(name: str, app: Celery | None = None) -> Task[Any, Any] | str:
    """Return the task of this name, with the options of its decorator, or else the name itself.

    If the app does not know the name, this imports the app's task modules, as a worker does at its
    start. The import may fail in a process that lacks the libraries of the workers.
    """
    sender: Any = app or current_app._get_current_object()  # type: ignore[attr-defined]
    if name not in sender.tasks:
        try:
            load_tasks(sender)
        except Exception as error:  # any error of the project's modules
            logger.warning("Task modules cannot be imported task=%s error=%s", name, error)
    return sender.tasks.get(name, name)  # type: ignore[no-any-return]


_loading = RLock()
_loaded: WeakSet[Celery] = WeakSet()


def _forget() -> None:
    """Let a forked child load for itself: the thread that has the lock is not in it."""
    global _loading
    _loading = RLock()
    _loaded.clear()


os.register_at_fork(after_in_child=_forget)


def load_tasks(app: Celery) -> None:
    """Import the task modules of an app, once."""
    # A second thread waits here: else it would find half of the tasks, and stage others by name.
    with _loading:
        if app not in _loaded:
            _loaded.add(app)
            # Celery would run the system checks first, which query all databases since Django 6.1.
            before = os.environ.get("CELERY_SKIP_CHECKS", "")
            os.environ["CELERY_SKIP_CHECKS"] = "1"
            try:
                app.loader.import_default_modules()
            finally:
                os.environ["CELERY_SKIP_CHECKS"] = before
