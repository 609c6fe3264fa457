"""The boundary: the stand-in for kombu's producer, at which Celery's finished message becomes a row.

Celery ends every send in ``producer.publish(body, exchange=…, headers=…, …)``. ``StagingProducer``
is a kombu producer that does all that kombu does (serialize, compress, set the delivery mode) and
then, where kombu would write to a channel, writes a row. It contacts nothing. ``Staged`` is raised
at that point, so that nothing after it
runs: ``after_task_publish`` and the ``task-sent`` event belong to the drain, which really
    publishes.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

from celery import Celery
from django.utils import timezone
from kombu import Producer

from ..exceptions import InvalidJob
from . import limits, rows
from .message import Message, describe, moment


class Staged(Exception):
    """Control flow: the message is a row now. Caught by ``unless_staged``; never leaves the package."""


class StagingProducer(Producer):  # type: ignore[misc]
    """Stages the one message that is published through it.

    Args:
        app: Celery app that sends.
        using: Database alias of the row.
        ordering_key: Key in whose order the job leaves; empty for none.
        hold: Seconds into the future beyond which the job is held in the table.
    """

    auto_declare = False

    def __init__(self, app: Celery, *, using: str, ordering_key: str, hold: float) -> None:
        super().__init__(None)
        self.app = app
        self.using = using
        self.ordering_key = ordering_key
        self.hold = hold
        self.task = ""
        self.sent_event: dict[str, Any] | None = None
        self.eta: Any = None
        self.expires: Any = None

    @property
    def connection(self) -> Any:
        """What Celery touches of a connection while it sends: the wrapping of errors."""
        return _NoConnection

    def publish(self, body: Any, **options: Any) -> None:
        """Stage one message; takes what ``kombu.Producer.publish`` takes.

        Raises:
            Staged: Always, once the row is taken.
            InvalidJob: The job could never be sent.
            kombu.exceptions.EncodeError: The body cannot be encoded.
        """
        times = options.get("headers") or {}
        if not times and isinstance(body, dict):  # task protocol 1
            times = body
        self.eta, self.expires = times.get("eta"), times.get("expires")
        options["priority"] = limits.check_priority(options.get("priority"))
        options.update(retry=False, retry_policy=None)
        super().publish(body, **options)

    def _publish(  # type: ignore[override]
        self,
        body: Any,
        priority: int,
        content_type: str,
        content_encoding: str,
        headers: dict[str, Any],
        properties: dict[str, Any],
        routing_key: str,
        mandatory: bool,
        immediate: bool,
        exchange: str,
        declare: list[Any],
        *ignored: Any,
    ) -> None:
        from ..models import StagedJob

        app = self.app
        message = Message(
            exchange=exchange,
            routing_key=routing_key,
            headers=headers,
            properties={k: v for k, v in properties.items() if v is not None},
            priority=priority,
            content_type=content_type,
            content_encoding=content_encoding,
            declare=[describe(entity, app) for entity in declare],
            expires=self.expires,
            sent_event=self.sent_event,
        )
        if self.expires:
            message.properties.pop("expiration", None)
        task_id = headers.get("id") or properties.get("correlation_id") or ""
        job = StagedJob(
            app=app.main or "",
            task=self.task,
            task_id=task_id,
            queue=_queue_of(declare) or routing_key,
            ordering_key=self.ordering_key,
            body=body.encode() if isinstance(body, str) else bytes(body),
        )
        try:
            job.envelope = message.dumps()
            eta = moment(self.eta, app)
        except (TypeError, ValueError) as error:
            raise InvalidJob(f"The message of {job} cannot be stored: {error}") from error
        limits.check_eta(eta)
        if eta is not None and eta - timezone.now() > timedelta(seconds=self.hold):
            job.available_at = eta
        limits.check_job(job, message)
        job.shard = rows.shard_of(self.ordering_key, task_id)
        rows.add(job, using=self.using)
        raise Staged


class _NoConnection:
    _reraise_as_library_errors = staticmethod(nullcontext)


def unless_staged(send: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``app.amqp.send_task_message`` so that it ends where the message became a row."""

    def send_or_stage(producer: Any, name: str, message: Any, **options: Any) -> Any:
        if not isinstance(producer, StagingProducer):
            return send(producer, name, message, **options)
        producer.task, producer.sent_event = name, message.sent_event
        try:
            return send(producer, name, message, **options)
        except Staged:
            return None

    send_or_stage.stages = True  # type: ignore[attr-defined]
    return send_or_stage


def _queue_of(declare: list[Any]) -> str:
    return str(declare[0].name) if declare and declare[0].name else ""
