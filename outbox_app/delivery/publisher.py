"""Hands batches to a broker through kombu, and says of every row what became of it.

A row is *accepted* when the broker said so: the reply to the pipeline on Redis, the confirm of a
mandatory message on RabbitMQ, the return of ``publish`` on other transports. A row that fails by
itself is *refused* with the exception. When the broker fails, the rows that may have gone are
*unknown*, and the connection is dropped: a late confirm on it could be credited to another message.
Nothing is retried here, and every wait is bounded.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from celery import Celery
from celery.signals import after_task_publish
from django.utils import timezone
from kombu import Producer, serialization
from kombu.exceptions import OperationalError

from ..exceptions import BrokerUnavailable, LeaseLost
from ..intake.message import Message, moment, restore
from .batch import Row
from .brokers import broker_at_fault, refuse_unsafe, transport_options

logger = logging.getLogger("outbox_app.drain")


@dataclass(slots=True)
class Outcome:
    """What became of the rows of one call. A row in none of the lists was not sent."""

    accepted: list[Row] = field(default_factory=list)
    refused: list[tuple[Row, Exception]] = field(default_factory=list)
    expired: list[Row] = field(default_factory=list)
    #: The broker may have taken these.
    unknown: list[Row] = field(default_factory=list)
    #: Why the broker stopped taking rows; None when it took all it was given.
    error: Exception | None = None


@dataclass(slots=True)
class Prepared:
    """A row, decoded and ready for ``Producer.publish``."""

    row: Row
    message: Message
    options: dict[str, Any]


class Publisher:
    """The drain's own connection to the broker of one Celery app.

    Args:
        app: Whose broker, queues and events.
        timeout: Bound of each network operation, in seconds.
    """

    def __init__(self, app: Celery, *, timeout: float) -> None:
        self.app = app
        self.timeout = timeout
        self.connection: Any = None
        self.producer: Any = None
        self._declared: set[str] = set()

    def open(self) -> None:
        """Connect, unless connected.

        Raises:
            BrokerUnavailable: The broker cannot be reached.
            UnsafeBroker: Its configuration loses messages.
        """
        if self.producer is not None:
            return
        app, timeout = self.app, self.timeout
        self.connection = app.connection_for_write(connect_timeout=timeout)
        self.connection = app.connection_for_write(
            connect_timeout=timeout,
            transport_options=transport_options(self.connection.transport.driver_type, timeout),
        )
        try:
            self.connection.ensure_connection(max_retries=1, interval_start=0, interval_step=0)
            channel = self.connection.channel()
            refuse_unsafe(self.connection, channel)
        except self._broker_errors() as error:
            self.close()
            raise BrokerUnavailable(
                f"The broker of Celery app {app.main!r} cannot be reached: {error!r}"
            ) from error
        except BaseException:
            self.close()
            raise
        self._returned: Exception | None = None
        on_return = self._on_return if hasattr(channel, "events") else None
        self.producer = Producer(
            channel,
            auto_declare=False,
            on_return=on_return,  # type: ignore[arg-type]  # kombu gives the error first
        )

    def close(self) -> None:
        """Drop the connection without a word to the broker."""
        connection, self.connection, self.producer = self.connection, None, None
        self._declared.clear()
        if connection is not None:
            try:
                connection.collect()
            except (
                Exception
            ) as error:  # a broken connection may fail in any way while it is dropped
                logger.debug("Dropping a connection failed error=%r", error)

    def publish(self, rows: Sequence[Row], *, still_owner: Callable[[], None]) -> Outcome:
        """Publish rows in the given order.

        Args:
            rows: Rows of this publisher's app.
            still_owner: Called before each send; raises ``LeaseLost`` when the rows belong to
                somebody else.

        Returns:
            The outcome of every row that was sent.

        Raises:
            BrokerUnavailable, UnsafeBroker: Nothing was sent.
        """
        self.open()
        outcome = Outcome()
        prepared = self._prepare(rows, outcome)
        self._declare(prepared, outcome)
        if self.producer is not None and self.producer.supports_batch_publish:
            self._publish_batch(prepared, outcome, still_owner)
        else:
            self._publish_singly(prepared, outcome, still_owner)
        self._announce(prepared, outcome)
        return outcome

    def _prepare(self, rows: Sequence[Row], outcome: Outcome) -> list[Prepared]:
        prepared = []
        now = timezone.now()
        for row in rows:
            try:
                message = Message.loads(row.envelope)
                options = _publish_options(message)
                expires = moment(message.expires, self.app)
                if expires is not None:
                    options["expiration"] = _seconds(expires, now)
                if expires is not None and options["expiration"] <= 0:
                    outcome.expired.append(row)
                    continue
                options["exchange"] = message.exchange
            except Exception as error:  # a damaged row may fail in any way
                outcome.refused.append((row, error))
            else:
                prepared.append(Prepared(row, message, options))
        return prepared

    def _declare(self, prepared: list[Prepared], outcome: Outcome) -> None:
        """Declare each queue once a connection: on RabbitMQ, no queue, no route."""
        for item in list(prepared):
            for declaration in item.message.declare:
                key = repr(declaration)
                if key in self._declared:
                    continue
                try:
                    self.open()
                    restore(declaration, self.app)(self.producer.channel).declare()
                except Exception as error:
                    if isinstance(error, self._broker_errors()):
                        self.close()
                        raise BrokerUnavailable(f"Declaring {key} failed: {error!r}") from error
                    if not isinstance(error, self._channel_errors()):
                        prepared.remove(item)
                        outcome.refused.append((item.row, error))
                        break
                    # The queue exists with other arguments, say. It can still be published to:
                    # whether a queue takes the message, the broker says of each.
                    logger.warning(
                        "Declaring failed, publishing all the same queue=%s error=%r", key, error
                    )
                    self.close()
                self._declared.add(key)
        self.open()

    def _publish_batch(
        self, prepared: list[Prepared], outcome: Outcome, still_owner: Callable[[], None]
    ) -> None:
        waiting = prepared
        while waiting:
            sick: tuple[Prepared, Exception] | None = None
            still_owner()
            try:
                with self.producer.batch(max_size=sys.maxsize):
                    for item in waiting:
                        try:
                            self._send(item)
                        except Exception as error:
                            sick = (item, error)
                            raise
            except Exception as error:
                if sick is not None and not self._broker_failed(error):
                    # Nothing has left yet: go on without the row that cannot be encoded.
                    outcome.refused.append((sick[0].row, sick[1]))
                    waiting = [item for item in waiting if item is not sick[0]]
                    continue
                self.close()
                cause = error.__cause__ or error
                outcome.unknown = [item.row for item in waiting]
                if self._broker_failed(cause):
                    outcome.error = cause  # type: ignore[assignment]
                else:
                    # One command of many was refused, and which others were taken is not known:
                    # they go again, one by one.
                    self.open()
                    self._publish_singly(waiting, outcome, still_owner)
                return
            outcome.accepted += [item.row for item in waiting]
            return

    def _publish_singly(
        self, prepared: list[Prepared], outcome: Outcome, still_owner: Callable[[], None]
    ) -> None:
        for item in prepared:
            try:
                still_owner()
                self.open()
            except (LeaseLost, BrokerUnavailable) as error:
                outcome.error = error
                return
            self._returned = None
            try:
                self._send(item, mandatory=True)
                if self._returned is not None:
                    raise self._returned
            except Exception as error:
                if self._returned is None:
                    self.close()
                if self._broker_failed(error):
                    outcome.unknown.append(item.row)
                    outcome.error = error
                    return
                outcome.refused.append((item.row, error))
            else:
                outcome.accepted.append(item.row)

    def _send(self, item: Prepared, **extra: Any) -> None:
        self.producer.publish(
            item.row.body,
            timeout=self.timeout,
            confirm_timeout=self.timeout,
            **item.options,
            **extra,
        )

    def _announce(self, prepared: list[Prepared], outcome: Outcome) -> None:
        """Fire what plain Celery fires after a publish."""
        if not after_task_publish.receivers and not any(p.message.sent_event for p in prepared):
            return
        accepted = {row.id for row in outcome.accepted}
        for item in prepared:
            if item.row.id not in accepted:
                continue
            message = item.message
            after_task_publish.send(
                sender=item.row.task,
                body=_decoded(item),
                headers=message.headers,
                exchange=message.exchange,
                routing_key=message.routing_key,
            )
            if message.sent_event and self.producer is not None:
                event = dict(
                    message.sent_event,
                    queue=item.row.queue,
                    exchange=message.exchange,
                    routing_key=message.routing_key,
                )
                try:
                    self.app.amqp._event_dispatcher.publish(  # type: ignore[attr-defined]
                        "task-sent", event, self.producer, retry=False
                    )
                except Exception as error:  # an event is a courtesy; the job has left
                    logger.warning(
                        "Event task-sent was not sent task_id=%s error=%r", item.row.task_id, error
                    )
                    self.close()

    def _on_return(self, error: Exception, exchange: str, routing_key: str, message: Any) -> None:
        # RabbitMQ returns an unroutable message before it confirms it.
        self._returned = error

    def _broker_failed(self, error: BaseException) -> bool:
        return isinstance(error, self._broker_errors()) or broker_at_fault(error)

    def _broker_errors(self) -> tuple[type[BaseException], ...]:
        connection = self.connection or self.app.connection_for_write()
        return (*connection.connection_errors, OperationalError, BrokerUnavailable)

    def _channel_errors(self) -> tuple[type[BaseException], ...]:
        connection = self.connection or self.app.connection_for_write()
        return tuple(connection.channel_errors)


def _publish_options(message: Message) -> dict[str, Any]:
    return {
        **message.properties,
        "routing_key": message.routing_key,
        "headers": message.headers,
        "priority": message.priority,
        "content_type": message.content_type,
        "content_encoding": message.content_encoding,
    }


def _seconds(until: datetime, now: datetime) -> float:
    return (until - now).total_seconds()


def _decoded(item: Prepared) -> Any:
    """Return the body as receivers of ``after_task_publish`` expect it, where decoding is safe."""
    message = item.message
    if message.content_type != "application/json" or message.headers.get("compression"):
        return item.row.body
    return serialization.loads(
        item.row.body, message.content_type, message.content_encoding, accept=["json"]
    )
