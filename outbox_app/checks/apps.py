"""The Celery apps of the process: one that stages is loaded, and workers accept its messages.

A message is stored as it is, in any serializer; neither the checks nor the drain decode it. A
message that a worker would refuse, or should not accept, is found before it is staged.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from celery import Celery, Task
from django.apps import apps as django_apps
from django.core.checks import CheckMessage, Error, Warning
from kombu import serialization

from ..capability import needed
from ..conf import outbox_settings
from ..jobs.staging.calls import MODES, deciding_pattern, own_mode
from ..jobs.staging.sending import active_apps, load_tasks, staging_apps
from ..text import error_text
from .messages import listed


def check_apps(**kwargs: Any) -> list[CheckMessage]:
    apps = staging_apps()
    if not apps:
        return [
            Warning(
                "No OutboxCelery app is loaded: delay() sends at once, in a transaction too.",
                hint="In celery.py write `from outbox_app.celery import OutboxCelery as Celery`, "
                "and import that app in the __init__.py beside it. Silence this if you stage by "
                "outbox_app.stage() only.",
                id="outbox.W001",
            )
        ]
    found = [*_check_names(apps)]
    for app in apps:
        found += _check_app(app)
    return [*found, *_check_tasks(), *_check_modes(apps)]


def _check_names(staging: list[Celery]) -> Iterator[CheckMessage]:
    """Report ambiguous names: a row names its app, and a drainer finds the broker by that name."""
    names = [app.main or "" for app in staging]
    for name, count in Counter(names).items():
        named = [app for app in active_apps() if app.main == name and not configuration_error(app)]
        if count > 1 or len({str(app.conf.broker_write_url) for app in named}) > 1:
            what = "Several Celery apps that stage" if count > 1 else "Apps with different brokers"
            yield Error(
                f"{what} are named {name!r}: a drainer cannot tell which broker a job is for.",
                hint='Give each app a name of its own: OutboxCelery("shop").',
                id="outbox.E010",
            )
    if "" in names:
        text = "A Celery app that stages has no name, so its jobs do not name their app."
        hint = 'Name the app before jobs are staged: OutboxCelery("shop").'
        yield Warning(text, hint=hint, id="outbox.W012")


def configuration_error(app: Celery) -> Exception | None:
    try:
        app.conf.task_serializer  # noqa: B018  # loads the configuration
    except Exception as error:  # the project's configuration may raise anything
        return error
    return None


def _check_app(app: Celery) -> Iterator[CheckMessage]:
    """Warn only: an app may belong to another service, and be configured on that one's hosts."""
    error = configuration_error(app)
    if error is None:
        try:
            load_tasks(app)
        except Exception as raised:  # the project's modules may raise anything
            error = raised
    if error is not None:
        why = error_text(error)
        text = f"Celery app {app.main!r} cannot be loaded here, with its task modules: {why}."
        hint = "Silence this where the app is not used, or only workers have its dependencies."
        yield Warning(text, hint=hint, id="outbox.W031")
    else:
        yield from _check_content(app)


def _check_tasks() -> Iterator[CheckMessage]:
    plain: dict[Any, set[str]] = {}
    for app in active_apps():
        with suppress(Exception):  # such errors are reported for apps that stage
            if not getattr(app, "stages_by_itself", False):
                load_tasks(app)
            for name, task in list(app.tasks.items()):
                # Registries share tasks. The code calls the task that its module holds.
                called = getattr(sys.modules.get(task.__module__), task.__name__, None)
                if (
                    isinstance(called, Task)
                    and called.name == name
                    and not name.startswith(("celery.", "outbox_app."))
                    and not getattr(called.app, "stages_by_itself", False)
                ):
                    plain.setdefault(called.app, set()).add(name)
    for app, names in plain.items():
        yield Warning(
            f"Tasks of Celery app {app.main!r}, which does not stage, are sent at once, even in a "
            f"transaction: {listed(sorted(names))}.",
            hint="Make that app an OutboxCelery, or bind the tasks to one. Tasks of @shared_task "
            "belong to the app that was created last. Silence this if they should be sent at once.",
            id="outbox.W032",
        )


def _check_modes(staging: list[Celery]) -> Iterator[CheckMessage]:
    """Report wrong attributes and idle patterns; ``check_settings`` checks the setting's modes."""
    names: set[str] = set()
    modes: list[Any] = list(outbox_settings().TASK_MODES.values())
    for app in staging:
        with suppress(Exception):  # reported by _check_app
            names.update(app.tasks)
            for name in sorted(app.tasks):
                modes.append(mode := own_mode(app, name))
                if mode not in (*MODES, None):
                    yield Error(
                        f"The attribute outbox of task {name} is {mode!r}; expected one of "
                        f"{', '.join(map(repr, MODES))}.",
                        hint='Write @app.task(outbox="send"), or remove the attribute.',
                        id="outbox.E048",
                    )
    if "shadow" in modes and not django_apps.is_installed("outbox_app.shadow"):
        yield needed("The mode 'shadow' of a task", ["outbox_app.shadow"])
    deciding = set(map(deciding_pattern, names))
    if idle := [each for each in outbox_settings().TASK_MODES if each not in deciding]:
        yield Warning(
            f"These patterns of OUTBOX['TASK_MODES'] decide for no task: {listed(idle)}.",
            hint="Check their spelling. The first pattern that matches a task decides, so put "
            "patterns of single tasks before wider ones. Silence this if the tasks are called by "
            "name only.",
            id="outbox.W039",
        )


def _check_content(app: Celery) -> Iterator[CheckMessage]:
    accepted = {_short(name) for name in app.conf.accept_content}
    used = {app.conf.task_serializer, *(task.serializer for task in app.tasks.values())}
    if refused := {_short(name) for name in used if name} - accepted:
        yield Warning(
            f"Tasks of Celery app {app.main!r} are staged in {_listed(refused)}, which its "
            f"workers refuse: accept_content is {_listed(accepted)}.",
            hint="Change the tasks' serializer, or the workers' accept_content.",
            id="outbox.W003",
        )


def _short(name: str) -> str:
    """Return the name of a serializer, given the name or the content type."""
    return str(serialization.registry.type_to_name.get(name, name))  # type: ignore[attr-defined]


def _listed(names: set[str]) -> str:
    return ", ".join(map(repr, sorted(names)))
