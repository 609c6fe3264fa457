"""Hands batches to a broker through kombu, and says of every row what became of it.

A row is *accepted* when the broker said so: the reply to the pipeline on Redis, the confirm of a
mandatory message on RabbitMQ, the return of ``publish`` on other transports. A row that fails by
itself is *refused* with the exception. When the broker fails, the rows that may have gone are
*unknown*, and the connection is dropped: a late confirm on it could be credited to another message.
Nothing is retried here, and every wait is bounded.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from amqp.exceptions import AccessRefused
from celery import Celery
from kombu import Producer
from kombu.common import Broadcast
from kombu.exceptions import OperationalError

from ..conf import settings
from ..exceptions import BrokerUnavailable, UnsafeBroker
from ..intake.message import Declaration, restore
from ..text import get_logger
from .batch import Row
from .brokers import (
    broker_at_fault,
    check_frame,
    check_route,
    probe,
    refuse_unsafe,
    refused_for_certain,
    row_at_fault,
    transport_options,
)
from .outgoing import Outcome, Prepared, announce, prepare

logger = get_logger("outbox_app.drain")


def _nothing() -> None: ...


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
        self._returned: Exception | None = None
        #: Exchanges of ``Broadcast`` queues: nobody may be listening, and that is no error.
        self._broadcasts: set[str] = set()
        #: A send was not answered: see ``brokers.probe``.
        self._doubtful = False
        #: A batch met a broker that answers but refuses, out of memory for example: one by one, as
        #: of a batch nobody knows which rows it took.
        self._careful = False

    def open(self, keep_alive: Callable[[], None] = _nothing) -> None:
        """Connect, unless connected.

        Args:
            keep_alive: Called between two attempts (of several brokers one may answer).

        Raises:
            BrokerUnavailable: The broker cannot be reached.
            UnsafeBroker: Its configuration loses messages.
        """
        if self.producer is not None:
            return
        app, timeout = self.app, self.timeout
        driver_type = app.connection_for_write().transport.driver_type
        self.connection = connection = app.connection_for_write(
            connect_timeout=timeout, transport_options=transport_options(driver_type, timeout)
        )
        try:
            connection.ensure_connection(
                errback=lambda *_: keep_alive(),
                max_retries=max(0, len(connection.alt) - 1),
                interval_start=0,
                interval_step=0,
            )
            channel = connection.channel()
            refuse_unsafe(connection, channel)
            if self._doubtful:
                probe(connection, channel, timeout=timeout)
            self._doubtful = False
        except BaseException as error:
            unavailable = self._is_lost(error) or broker_at_fault(error)
            self.close()
            if unavailable:
                raise BrokerUnavailable(
                    f"The broker of Celery app {app.main!r} cannot be reached: {_words(error)}"
                ) from error
            raise
        queues = app.amqp.queues.values()
        self._broadcasts = {q.exchange.name for q in queues if isinstance(q, Broadcast)}
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
            except Exception as error:  # a broken one may fail in any way while it is dropped
                logger.debug("Dropping a connection failed error=%r", error)

    def publish(
        self, rows: Sequence[Row], *, now: datetime, may_send: Callable[[], None] = _nothing
    ) -> Outcome:
        """Publish rows in the given order.

        Args:
            rows: Rows of this publisher's app.
            now: Time by which rows expire.
            may_send: Called before each send; raises what then ends up in ``Outcome.error``.

        Returns:
            The outcome of every row that was sent. Whatever failed is in there, never raised: what
            the broker has taken by then has to be settled.
        """
        outcome = Outcome(began=time.time_ns())
        try:
            self.open(may_send)
            outcome.prepared = prepare(rows, self.app, now=now, outcome=outcome)
            ready = self._declare(outcome.prepared, outcome, may_send)
            self.open(may_send)
            if self.producer.supports_batch_publish and not self._careful:
                self._publish_batch(ready, outcome, may_send)
            else:
                self._publish_singly(ready, outcome, may_send)
                self._careful = False
        except Exception as error:
            outcome.error = error
        outcome.ended = time.time_ns()
        announce(outcome.prepared, outcome.accepted)
        self._send_events(outcome.prepared, outcome)
        return outcome

    def _declare(
        self, prepared: list[Prepared], outcome: Outcome, may_send: Callable[[], None]
    ) -> list[Prepared]:
        """Declare each queue once a connection, and check the route where no broker does."""
        ready = []
        checked = set()
        for item in prepared:
            route = item.message.exchange, item.message.routing_key
            if not item.declare.keys() <= self._declared:
                may_send()
            self.open(may_send)
            try:
                for name, declaration in item.declare.items():
                    self._declare_once(name, declaration)
                self.open()
                check_frame(self.connection, item.row.envelope)
                if route not in checked:
                    check_route(self.producer.channel, *route)
                    checked.add(route)
            except UnsafeBroker:
                raise
            except Exception as error:
                if self._is_row_error(error):
                    outcome.refuse(item.row, error)
                    if row_at_fault(error):
                        self.close()
                    continue
                self.close()
                raise self._unavailable(error) from error
            ready.append(item)
        return ready

    def _declare_once(self, name: str, declaration: Declaration) -> None:
        if name in self._declared:
            return
        self.open()
        try:
            restore(declaration, self.app)(self.producer.channel).declare()
        except self.connection.channel_errors as error:
            if broker_at_fault(error) and not hasattr(error, "reply_code"):
                raise  # it is Redis'
            # The queue exists with other arguments, say, or we may not declare it. It can still be
            # published to: whether a queue takes the message, the broker says of each.
            logger.warning(
                "Declaring failed, publishing all the same queue=%s error=%r", name, error
            )
            declared = set(self._declared)
            self.close()
            self._declared = declared
        self._declared.add(name)

    def _publish_batch(
        self, prepared: list[Prepared], outcome: Outcome, may_send: Callable[[], None]
    ) -> None:
        may_send()
        sent: list[Prepared] = []
        collected = False
        try:
            with self.producer.batch(max_size=sys.maxsize):
                for item in prepared:
                    if self._is_blocked(item.row, outcome):
                        continue
                    try:
                        self._send(item)
                    except Exception as error:
                        if not self._is_row_error(error):
                            raise
                        outcome.refuse(item.row, error)  # nothing of it is in the batch
                    else:
                        sent.append(item)
                collected = True
        except Exception as error:
            self.close()
            if not collected:  # nothing has left
                raise self._unavailable(error) from error
            cause = error.__cause__ or error
            self._doubtful = self._is_lost(cause)
            outcome.unknown = [item.row for item in sent]
            self._careful = not self._is_lost(cause)
            if not self._careful:
                raise self._unavailable(cause) from cause
            # One command of many was refused, and which others were taken is not known: they go
            # again, one by one.
            self.open(may_send)
            self._publish_singly(sent, outcome, may_send)
            self._careful = False
        else:
            outcome.accepted += [item.row for item in sent]

    def _publish_singly(
        self, prepared: list[Prepared], outcome: Outcome, may_send: Callable[[], None]
    ) -> None:
        for item in prepared:
            if self._is_blocked(item.row, outcome):
                continue
            may_send()
            self.open(may_send)
            self._returned = None
            try:
                self._send(item, mandatory=item.message.exchange not in self._broadcasts)
                if self._returned is not None:
                    raise self._returned
            except Exception as error:
                if self._returned is None:
                    self.close()
                if self._is_row_error(error):
                    outcome.refuse(item.row, error)
                    continue
                self._doubtful = True
                # Of several queues one may have taken it.
                fanned_out = item.message.exchange and not isinstance(error, AccessRefused)
                if fanned_out or not refused_for_certain(error):
                    outcome.unknown.append(item.row)
                raise self._unavailable(error) from error
            outcome.accepted.append(item.row)

    def _send(self, item: Prepared, **extra: Any) -> None:
        self.producer.publish(
            item.row.body,
            timeout=self.timeout,
            confirm_timeout=self.timeout,
            **item.options,
            **extra,
        )

    def _send_events(self, prepared: Sequence[Prepared], outcome: Outcome) -> None:
        """Send the ``task-sent`` events that plain Celery sends after a publish."""
        wanted = [item for item in prepared if item.message.sent_event]
        accepted = {row.id for row in outcome.accepted} if wanted else set()
        for item in wanted:
            if item.row.id not in accepted or self.producer is None:
                continue
            event = {
                **(item.message.sent_event or {}),
                "queue": item.row.queue,
                "exchange": item.message.exchange,
                "routing_key": item.message.routing_key,
            }
            try:
                self.app.amqp._event_dispatcher.publish(  # type: ignore[attr-defined]
                    "task-sent", event, self.producer, retry=False
                )
            except Exception as error:  # an event is a courtesy; the job has left
                logger.warning(
                    "Event task-sent was not sent task_id=%s error=%r", item.row.task_id, error
                )
                self.close()

    def _is_blocked(self, row: Row, outcome: Outcome) -> bool:
        return settings().DEAD_KEY == "block" and outcome.comes_after_a_dead_one(row)

    def _on_return(self, error: Exception, exchange: str, routing_key: str, message: Any) -> None:
        # RabbitMQ returns an unroutable message before it confirms it.
        self._returned = error

    def _unavailable(self, error: BaseException) -> BrokerUnavailable:
        if isinstance(error, BrokerUnavailable):
            return error
        return BrokerUnavailable(
            f"The broker of Celery app {self.app.main!r} failed: {_words(error)}"
        )

    def _is_row_error(self, error: BaseException) -> bool:
        """Say whether the row is to blame: the broker is there, and in a state to take others."""
        return row_at_fault(error) or not (self._is_lost(error) or broker_at_fault(error))

    def _is_lost(self, error: BaseException) -> bool:
        connection = self.connection or self.app.connection_for_write()
        # kombu counts KeyError among the errors of a connection to Redis; here a row makes it.
        lost = tuple(e for e in connection.connection_errors if not issubclass(e, LookupError))
        return isinstance(error, (*lost, OSError, OperationalError, BrokerUnavailable))


def _words(error: BaseException) -> str:
    # Not its repr: that of redis-py leaves the words out.
    return f"{type(error).__name__}: {error}"
