"""Sent jobs with a receipt whose limit is over: look, and send again only what seems to be lost.

In this order: a job that a worker executes waits on; one that was published often enough, and never
begun, is dead; while messages wait in its queue, its own may be among them, and it waits on, so
that a slow queue does not grow by copies of itself. What is left is sent again, with an incident.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from django.db import transaction

from ...exceptions import NoReceipt
from ...models import Incident, Run
from ..runs import running
from .app_drain import AppDrain
from .batch import Row, look_later
from .connection import MaySend
from .incidents import record_incident

#: Publishes without a start after which a job is dead.
PUBLISHES = 5


class Overdue(NamedTuple):
    """The overdue rows of a batch, by what happens to them. Those in neither list wait on."""

    again: list[Row]
    dead: list[tuple[Row, Exception]]


def sort_overdue(
    rows: Sequence[Row], app: AppDrain, *, using: str, by: str, may_send: MaySend
) -> Overdue:
    """Sort rows whose receipt has not come in time; let those wait on whose job may still come.

    Raises:
        BrokerUnavailable: The broker does not tell the length of a queue. Nothing has changed.
    """
    ids = [row.id for row in rows]
    alive = running(ids, using=using)
    begun = set(Run.objects.using(using).filter(pk__in=ids).values_list("pk", flat=True))
    idle = [row for row in rows if row.id not in alive]
    dead = [row for row in idle if (row.publishes or 0) >= PUBLISHES and row.id not in begun]
    gone = {row.id for row in dead}
    idle = [row for row in idle if row.id not in gone]
    waiting = app.waiting({row.queue for row in idle}, may_send=may_send) if idle else {}
    again = [row for row in idle if not waiting.get(row.queue)]
    left = gone | {row.id for row in again}
    look_later([(row.id, row.task_id) for row in rows if row.id not in left], using=using)
    if again:
        _record(again, using=using, by=by)
    error = NoReceipt(
        f"The job was published {PUBLISHES} times; no worker with receipts has started it. Start "
        "workers that take from its queue and have outbox_app installed, then requeue the job."
    )
    return Overdue(again, [(row, error) for row in dead])


def _record(rows: list[Row], *, using: str, by: str) -> None:
    detail = f"Sent again by {by}: no worker has started them within their limit, or finished them."
    with transaction.atomic(using=using):
        record_incident(
            Incident.Kind.NO_RECEIPT,
            shards={row.shard for row in rows},
            ids=[row.id for row in rows],
            detail=detail,
            using=using,
        )
