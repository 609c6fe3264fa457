"""What tests write into the project's database, and what they ask of it.

Each function runs in the process that ``Project.ask`` has for it, which has the project's settings.
Tasks that tests add are called ``browser.…``, so that ``sweep`` finds them.
"""

from __future__ import annotations

import json
import time
from datetime import timedelta
from typing import Any

from django.apps import apps
from django.core.management import call_command
from django.db import transaction
from django.utils.timezone import now

from outbox_app.events.models import Event, Gap, ParkedStream
from outbox_app.jobs.staging.insert import shard_of_job
from outbox_app.models import DeadJob, Incident, StagedJob
from tests.jobs.dead.rows import message
from tests.patience import patience
from tests.tables import short_name

MINUTE, SECOND = timedelta(minutes=1), timedelta(seconds=1)
#: Why jobs died, where it does not matter.
REASON = {"error": "kombu.exceptions.OperationalError", "reason": "[Errno 111] Connection refused"}


def _columns(task: str, key: str, **given: Any) -> dict[str, Any]:
    task_id = given.pop("task_id", f"{task}-{now().timestamp()}")[:255]
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    headers = {"lang": "py", "task": task, "id": task_id, "retries": 0, "traceparent": trace}
    return {
        "task": task, "task_id": task_id, "queue": "celery", "app": "example_project",
        "ordering_key": key, "shard": shard_of_job(key, task_id),
        "body": json.dumps([["5b0c-11"], {"password": "hunter2"}, {}]).encode(),
        "envelope": message(headers=headers), **given,
    }  # fmt: skip


def die(task: str, key: str = "", **given: Any) -> int:
    """Write a dead job; return its id."""
    return DeadJob.objects.create(**_dead(task, key, **given)).pk


def _dead(task: str, key: str = "", **given: Any) -> dict[str, Any]:
    given.setdefault("died_at", now())
    return {
        "staged_id": 1, "staged_at": given["died_at"] - SECOND, **REASON,
        **_columns(task, key, **given),
    }  # fmt: skip


def hold(task: str, key: str = "", *, minutes: int = 60, **given: Any) -> int:
    """Write a job that is held for so long; return its id."""
    until = now() + minutes * MINUTE
    row = StagedJob.objects.create(available_at=until, **_columns(task, key, **given))
    return row.pk


def gap(stream: str, subscription: str = "invoice-mails", **given: Any) -> int:
    """Write a gap that a reader waits for, with the stream it has parked; return its id."""
    ParkedStream.objects.create(
        subscription=subscription, partition=0, log="outbox_event", stream=stream, version=2,
        position=1, error="version 2 to 3 are missing", **given,
    )  # fmt: skip
    row = Gap.objects.create(subscription=subscription, kind="version", log="outbox_event",
                             stream=stream, first=2, last=3, attempts=20)  # fmt: skip
    return row.pk


def die_in_both(second: str) -> int:
    """Write a dead job to each of two databases, with one id; return it."""
    call_command("migrate", database=second, verbosity=0)
    pk = die("browser.first", task_id="on-the-first")
    DeadJob.objects.using(second).create(pk=pk, **_dead("browser.second", task_id="on-the-second"))
    return pk


def on(alias: str, model: str) -> list[str]:
    """Return the tasks of a table on an alias."""
    found = apps.get_model(model)._default_manager.using(alias)
    return sorted(found.filter(task__startswith="browser.").values_list("task", flat=True))


def die_often(task: str, count: int) -> None:
    """Write many dead jobs of a task."""
    DeadJob.objects.bulk_create(
        DeadJob(**_dead(task, task_id=f"{task}-{number}") | {"staged_id": number})
        for number in range(1, count + 1)
    )


def kill_order_anew() -> str:
    """Have a real job of the shop die before it leaves; return its task id."""
    with transaction.atomic():
        task_id = _order_anew()
        row = StagedJob.objects.get(task_id=task_id)
        row.delete()
        DeadJob.objects.create(staged_id=1, died_at=now(), **REASON, **row.copied())
    return task_id


def _order_anew() -> str:
    from example_project.shop.models import Stock
    from example_project.shop.tasks import reorder

    with transaction.atomic():
        return str(reorder.delay(Stock.objects.first().pk).id)


def sweep() -> None:
    """Remove what tests have added."""
    for model in (DeadJob, StagedJob):
        model.objects.filter(task__startswith="browser.").delete()
    for table in (Gap, ParkedStream):
        table.objects.filter(stream__startswith="order-3").delete()
    Incident.objects.filter(kind="requeue").delete()


def rows(model: str, *names: str, **filters: Any) -> list[Any]:
    """Return columns of the rows that match; of one column its values."""
    found = apps.get_model(model)._default_manager.filter(**filters).order_by("pk")
    return list(found.values_list(*names, flat=len(names) == 1))


def delete(model: str, **filters: Any) -> None:
    apps.get_model(model)._default_manager.filter(**filters).delete()


def change(model: str, pk: Any, **columns: Any) -> None:
    apps.get_model(model)._default_manager.filter(pk=pk).update(**columns)


def session(name: str, permissions: list[str] | None = None) -> dict[str, str]:
    """Return the cookie of a user who is logged in: a superuser, or with these permissions only."""
    from django.conf import settings
    from django.contrib.auth import BACKEND_SESSION_KEY, HASH_SESSION_KEY, SESSION_KEY
    from django.contrib.auth.models import Permission, User
    from django.contrib.sessions.backends.db import SessionStore

    user, _ = User.objects.get_or_create(
        username=name, is_staff=True, is_superuser=permissions is None
    )
    if permissions is not None:
        ours = Permission.objects.filter(content_type__app_label__startswith="outbox")
        found = ours.filter(codename__in=permissions)
        assert len(found) == len(permissions)
        user.user_permissions.set(found)
    store = SessionStore()
    store[SESSION_KEY] = str(user.pk)
    store[BACKEND_SESSION_KEY] = "django.contrib.auth.backends.ModelBackend"
    store[HASH_SESSION_KEY] = user.get_session_auth_hash()
    store.create()
    return {"name": settings.SESSION_COOKIE_NAME, "value": str(store.session_key)}


def addresses() -> dict[str, str]:
    """Return the pages of the outbox that are there to be looked at, by their names."""
    from django.contrib import admin
    from django.urls import reverse

    found = {
        "index": reverse("admin:index"),
        "outbox": reverse("admin:app_list", args=["outbox_app"]),
    }
    for outer in admin.site.urls[0]:
        for inner in getattr(outer, "url_patterns", []):
            label, model, page = ("__" + (inner.name or "")).rsplit("_", 2)
            if (
                not str(outer.pattern).startswith("outbox_")
                or not inner.name
                or page in ("add", "delete")
            ):
                continue
            arguments = []
            if inner.pattern.converters:
                arguments = [apps.get_model(label[2:], model).objects.order_by("pk").first().pk]
            found[short_name(inner.name)] = reverse(f"admin:{inner.name}", args=arguments)
    return found


def wait_for(model: str, **filters: Any) -> None:
    """Return when there is such a row, which another process is about to write.

    Raises:
        TimeoutError: There is none for too long.
    """
    deadline = time.monotonic() + patience(60)
    while not apps.get_model(model)._default_manager.filter(**filters).exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"No {model} with {filters}.")
        time.sleep(0.05)


def order() -> str:
    """Place an order in the shop; return its id."""
    from example_project.shop.models import Stock
    from example_project.shop.services import place_order

    return str(place_order("browser@shop.example", Stock.objects.first()).pk)


def begin() -> None:
    """Publish an event and leave the transaction open."""
    transaction.set_autocommit(False)
    Event.objects.create(stream="order-4001", version=1, type="order.delayed", slice=1)


def roll_back() -> None:
    transaction.rollback()
    transaction.set_autocommit(True)


def take_over() -> None:
    """Migrate a new database, and record a takeover there, as ``make demo`` does."""
    call_command("migrate", verbosity=0)
    Incident.objects.create(kind="takeover", shards=[1], first_id=1, last_id=2)
