"""The Celery app of every process of the soak, its task, the subscriptions, and the bookkeeping.

SOAK_BROKER is the broker's address, SOAK_PARTITIONS the number of partitions of ``parts``, which
the soak changes while it runs.
"""

from __future__ import annotations

import os
from typing import Any
from uuid import uuid4

from django.db import transaction
from django.dispatch import receiver
from kombu import Exchange, Queue
from kombu.transport import pyamqp

from outbox_app import idempotent, stage_many
from outbox_app.celery import OutboxCelery
from outbox_app.events import subscriber
from outbox_app.jobs.drain import amqp_batch
from outbox_app.models import StagedJob
from outbox_app.signals import jobs_staged

from .models import Executed, Handled, Staged

#: ``soak`` takes all jobs with a key. The broker refuses ``soak-fragile`` at times. ``soak-work``
#: is for a Celery worker, which gets copies of accepted messages.
QUEUES = ("soak", "soak-fragile", "soak-work")

app = OutboxCelery("soak", broker=os.environ["SOAK_BROKER"])
app.conf.update(
    task_queues=[Queue(name, Exchange(name), routing_key=name) for name in QUEUES],
    task_default_queue="soak",
    task_ignore_result=True,
    task_acks_late=True,
    task_reject_on_worker_lost=True,
    worker_prefetch_multiplier=1,
)


class TaggingChannel(pyamqp.Channel):
    """Gives each publish a unique tag, as kombu does on Redis. A redelivery keeps its tag."""

    def prepare_message(self, body: Any, *args: Any, **options: Any) -> Any:
        """Return kombu's message, tagged."""
        message = super().prepare_message(body, *args, **options)
        message.properties["message_id"] = uuid4().hex
        return message


class TaggingFrames(amqp_batch.Frames):
    """Gives a unique tag to each message that the drain fills into another message's frames."""

    def of(self, item: Any) -> bytes:
        """Return the frames of a message, tagged."""
        item.message.headers["tag"] = uuid4().hex
        return super().of(item)


pyamqp.Connection.Channel = TaggingChannel
amqp_batch.Frames = TaggingFrames  # type: ignore[misc]


@app.task(name="soak.effect", bind=True)
@idempotent
def effect(self: Any) -> None:
    """Note that the job was executed."""
    Executed.objects.create(task_id=self.request.id)


@receiver(jobs_staged)
def enter(using: str, jobs: list[Any], **kwargs: Any) -> None:
    """Enter the staged jobs into the books, in their transaction."""
    try:
        written = StagedJob.objects.filter(task_id__in=[job.task_id for job in jobs])
        rows = dict(written.values_list("task_id", "id"))
        Staged.objects.bulk_create(
            Staged(
                task_id=job.task_id, row=rows[job.task_id], shard=job.shard, key=job.ordering_key
            )
            for job in jobs
        )
    except Exception:  # the signal swallows errors, but the job must not commit without its entry
        transaction.set_rollback(True)
        raise


def note(name: str, events: list[Any]) -> None:
    """Note that a subscription has handled events."""
    Handled.objects.bulk_create(Handled(subscription=name, position=e.id) for e in events)


@subscriber("one")
def handle_one(events: list[Any]) -> None:
    """Handle events in one partition, in the order of the whole log."""
    note("one", events)


@subscriber("parts", partitions=int(os.environ.get("SOAK_PARTITIONS", "4")), on_error="park")
def handle_parts(events: list[Any]) -> None:
    """Handle events in several partitions, whose number changes."""
    note("parts", events)


@subscriber("tasks", partitions=2)
def handle_tasks(events: list[Any]) -> None:
    """Stage a job for each event, with the event's stream as the ordering key."""
    note("tasks", events)
    stage_many(
        effect.signature(task_id=f"event-{e.id}", ordering_key=f"stream-{e.stream}") for e in events
    )
