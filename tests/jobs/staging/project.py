"""A project for real workers: ``celery -A tests.jobs.staging.project worker``.

The worker's process reads what to connect to from its environment; a test makes the same app of the
same arguments and is its client.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

from celery import chord, group
from django.apps import apps
from django.db import transaction

from outbox_app.celery import OutboxCelery
from tests.jobs.staging import tasks


def make(name: str, broker: str, backend: str, using: str) -> OutboxCelery:
    """Return the app with its tasks, which work on the alias ``using``."""
    app = OutboxCelery(name, broker=broker, backend=backend, set_as_current=False)
    app.conf.update(task_default_queue=name, worker_hijack_root_logger=False)
    task = partial(app.task, shared=False)
    add = task(name="add")(tasks.add)
    task(name="double")(tasks.double)
    total = task(name="total")(tasks.total)

    def write(name: str) -> None:
        apps.get_model("auth.Group").objects.using(using).create(name=name)

    @task(name="failing")
    def failing():
        raise ValueError("on purpose")

    @task(name="note")
    def note(text):
        write(text)

    @task(name="staging")
    def staging(x):
        with transaction.atomic(using=using):
            add.apply_async((x, 100), countdown=4000)

    @task(name="outside")
    def outside(x):
        return add.apply_async((x, 100), countdown=4000).id

    @task(name="retrying", bind=True)
    def retrying(self, x):
        with transaction.atomic(using=using):
            write(f"attempt {self.request.retries}")
            if self.request.retries < 2:
                raise self.retry(countdown=0)
        return x

    @task(name="replacing", bind=True)
    def replacing(self, how, x):
        canvas = {
            "task": add.s(x, 1),
            "chain": add.s(x, 1) | add.s(1),
            "group": group(add.s(x, 1), add.s(x, 2)),
            "chord": chord([add.s(x, 1), add.s(x, 2)], total.s()),
            "group in a chain": group(add.s(x, 1), add.s(x, 2)) | total.s(),
        }[how]
        with transaction.atomic(using=using):
            write("of the replaced task")
            raise self.replace(canvas)

    return app


def variables(**values: Any) -> dict[str, str]:
    """Return the environment in which a worker's process finds what ``make`` takes."""
    return {f"PROJECT_{name.upper()}": str(value) for name, value in values.items()}


if "PROJECT_NAME" in os.environ:
    import django
    from django.conf import settings

    django.setup()
    settings.OUTBOX["OUTSIDE"] = os.environ.get("PROJECT_OUTSIDE", "send")
    app = make(*(os.environ[f"PROJECT_{name}"] for name in ("NAME", "BROKER", "BACKEND", "USING")))
