"""Models with ``OutboxMixin``: declarations that cannot work, and where their jobs are staged.

The checks look task names up as staging does, so they import task modules. They do not call
callables, so the tasks that these return are not checked.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from celery import current_app
from celery.app.task import Task
from celery.canvas import Signature
from django.apps import AppConfig, apps
from django.core.checks import CheckMessage, Error, Warning
from django.db import router

from ..aliases import outbox_alias
from ..jobs.staging.sending import StagingMixin, task_named
from ..mixin import Declared, OutboxMixin


def check_models(
    app_configs: Sequence[AppConfig] | None = None, **kwargs: Any
) -> list[CheckMessage]:
    return [
        message
        for model in apps.get_models()
        if issubclass(model, OutboxMixin)
        if app_configs is None or model._meta.app_config in app_configs
        for message in (*_check_alias(model), *_check_declarations(model))
    ]


def _check_alias(model: type[OutboxMixin]) -> Iterator[CheckMessage]:
    own, outbox = router.db_for_write(model), outbox_alias()
    if own != outbox:
        yield Error(
            f"The model is written to {own!r}, so its jobs are staged there, but drainers read "
            f"{outbox!r}, the alias of the outbox.",
            hint=f"Set OUTBOX['DATABASE'] to {own!r}; or run `manage.py drain_outbox --database "
            f"{own}` too, and silence this. {own!r} needs the tables of outbox_app.",
            obj=model,
            id="outbox.E023",
        )


def _check_declarations(model: type[OutboxMixin]) -> Iterator[CheckMessage]:
    hint = 'Write a list of on_create("app.tasks.name"), on_update(…) and on_delete(…).'
    if not isinstance(model.outbox, list | tuple):
        text = f"outbox is {model.outbox!r}; expected a list."
        yield Error(text, hint=hint, obj=model, id="outbox.E006")
        return
    for item in model.outbox:
        text, advised = "", hint
        if not isinstance(item, Declared):
            text = f"outbox has {item!r}, which is not a declaration."
        elif not isinstance(item.task, str | Task | Signature) and not callable(item.task):
            text = f"on_{item.change}() has {item.task!r}, which is not a task."
            advised = "Give a task, its name, a signature, or a callable that takes the instance "
            advised += "and returns signatures."
        elif item.when is not None and not callable(item.when):
            text = f"on_{item.change}() has when={item.when!r}, which is not callable."
            advised = "Give a callable that takes the instance, such as lambda order: order.paid."
        elif isinstance(item.task, str):
            yield from _check_task(model, item.task, item.options.get("app"))
        if text:
            yield Error(text, hint=advised, obj=model, id="outbox.E006")


def _check_task(model: type[OutboxMixin], name: str, app: Any) -> Iterator[CheckMessage]:
    app = app or current_app._get_current_object()  # type: ignore[attr-defined]
    if isinstance(app, StagingMixin) and task_named(name, app) == name:  # type: ignore[arg-type]
        text = f"The Celery app {app.main!r} has no task {name!r}."  # type: ignore[attr-defined]
        hint = "Correct the name. Silence this if only workers of another project know the task."
        yield Warning(text, hint=hint, obj=model, id="outbox.W005")
