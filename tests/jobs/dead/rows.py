"""Dead and staged rows for tests, without a broker having refused anything."""

from __future__ import annotations

import itertools
import json
from typing import Any

from outbox_app.jobs.message import Message
from outbox_app.jobs.staging.insert import shard_of_job
from outbox_app.models import DeadJob, StagedJob

numbers = itertools.count(1)


def message(**fields: Any) -> str:
    """An envelope as staging writes it; a field that is given replaces the default."""
    defaults = {
        "exchange": "",
        "routing_key": "celery",
        "headers": {"lang": "py", "task": "shop.send", "id": "an-id"},
        "properties": {"delivery_mode": 2},
        "priority": 0,
        "content_type": "application/json",
        "content_encoding": "utf-8",
    }
    return Message(**{**defaults, **fields}).dumps()


def columns(**given: Any) -> dict[str, Any]:
    number = next(numbers)
    values = {
        "ordering_key": "",
        "task": "shop.send",
        "task_id": f"task-{number}",
        "queue": "celery",
        "app": "shop",
        "body": json.dumps([[number], {}, {}]).encode(),
        "envelope": message(),
        "receipt": None,
        **given,
    }
    values.setdefault("shard", shard_of_job(values["ordering_key"], values["task_id"]))
    return values


def dead_row(**given: Any) -> DeadJob:
    values = columns(**given)
    values.setdefault("staged_id", next(numbers))
    values.setdefault("error", "builtins.Trouble")
    values.setdefault("reason", "The broker said no.")
    return DeadJob(**values)


def dead_jobs(count: int = 1, *, using: str, **given: Any) -> list[DeadJob]:
    """Write so many dead jobs; their staged ids rise."""
    return _written(DeadJob, [dead_row(**given) for _ in range(count)], using)


def staged_jobs(count: int = 1, *, using: str, **given: Any) -> list[StagedJob]:
    """Write so many staged jobs."""
    return _written(StagedJob, [StagedJob(**columns(**given)) for _ in range(count)], using)


def _written(model: Any, rows: list[Any], using: str) -> list[Any]:
    table = model.objects.using(using)
    table.bulk_create(rows)
    if any(row.pk is None for row in rows):  # MySQL does not say which ids they have got
        ids = table.order_by("-pk").values_list("pk", flat=True)[: len(rows)]
        for row, id in zip(reversed(rows), ids, strict=True):
            row.pk = id
    return rows
