"""The Celery apps of the process: one that stages is loaded, and workers accept what it stages.

A message is stored as it is, in whatever serializer; nothing here and nothing in the drain decodes
one. What a worker would refuse, or should not accept, is said before it is staged.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from celery import Celery, _state
from django.core.checks import CheckMessage, Error, Warning
from kombu import serialization

from ..intake.declaration import load_tasks

#: Serializers that kombu accepts only where they are asked for.
INSECURE = {"pickle", "yaml"}


def check_apps(**kwargs: Any) -> list[CheckMessage]:
    """Say what is wrong with the Celery apps that stage."""
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
    found = _check_names([app.main or "" for app in apps])
    for app in apps:
        found += [*_check_modules(app), *_check_content(app)]
    return found


def staging_apps() -> list[Celery]:
    """Return the loaded apps whose calls stage, by name."""
    apps: list[Any] = list(_state._get_active_apps())  # type: ignore[attr-defined]
    staging = [app for app in apps if getattr(app, "stages_by_itself", False)]
    return sorted(staging, key=lambda app: app.main or "")


def _check_names(names: list[str]) -> list[CheckMessage]:
    """A row names its app, and a drainer finds the broker by that name."""
    found: list[CheckMessage] = [
        Error(
            f"Several Celery apps that stage are named {name!r}: a drainer cannot tell whose "
            "broker a job is for.",
            hint='Give each a name of its own: OutboxCelery("shop").',
            id="outbox.E010",
        )
        for name, count in Counter(names).items()
        if count > 1
    ]
    if "" in names:
        found.append(
            Warning(
                "A Celery app that stages has no name; its jobs name none either.",
                hint='Give it one before jobs are staged: OutboxCelery("shop").',
                id="outbox.W012",
            )
        )
    return found


def _check_modules(app: Celery) -> list[CheckMessage]:
    try:
        load_tasks(app)
    except Exception as error:  # whatever the project's modules raise
        return [
            Warning(
                f"The task modules of Celery app {app.main!r} cannot be imported: {error!r}.",
                hint="A worker would not start, either. Silence this where only workers have what "
                "the modules need; tasks are then staged by name.",
                id="outbox.W002",
            )
        ]
    return []


def _check_content(app: Celery) -> list[CheckMessage]:
    found: list[CheckMessage] = []
    accepted = {_short(name) for name in app.conf.accept_content}
    used = {app.conf.task_serializer, *(task.serializer for task in app.tasks.values())}
    refused = sorted({_short(name) for name in used if name} - accepted)
    if refused:
        found.append(
            Warning(
                f"Tasks of Celery app {app.main!r} are staged in {_listed(refused)}, which its "
                f"workers refuse: accept_content is {_listed(sorted(accepted))}.",
                hint="Change the serializer, or accept_content of the workers.",
                id="outbox.W003",
            )
        )
    if accepted & INSECURE:
        found.append(
            Warning(
                f"The workers of Celery app {app.main!r} accept "
                f"{_listed(sorted(accepted & INSECURE))}: whoever can write to the broker or to "
                "the outbox tables may run code in them.",
                hint="Take it out of accept_content, and use json.",
                id="outbox.W004",
            )
        )
    return found


def _short(name: str) -> str:
    """Return the name of a serializer, where its content type is given."""
    return str(serialization.registry.type_to_name.get(name, name))  # type: ignore[attr-defined]


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names))
