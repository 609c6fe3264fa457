"""Hands batches to a broker through kombu, and reports the outcome of every row.

A row is *accepted* when the broker said so: the reply to its command on Redis, the confirm of a
mandatory message on RabbitMQ, the return of ``publish`` on other transports. A row that fails by
itself is *refused* with the exception. When the broker fails, the rows that may have left are
*unknown*, and the connection is dropped: a late confirm on it could be credited to another message.
Nothing is retried here, with one exception: if RabbitMQ closes the channel because of one message
of a batch, the messages without a confirm are unknown, and are sent again one by one. Every wait is
bounded. The lease is renewed between two sends, and no batch may take longer than the lease lasts.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime
from types import NoneType

from amqp.exceptions import AccessRefused
from celery.exceptions import SoftTimeLimitExceeded

from ...conf import outbox_settings
from ...exceptions import UnsafeBroker
from ...text import get_logger
from ..exchanges import exchange_types, needs_route
from ..message import Declaration, restore
from . import brokers
from .amqp_batch import AmqpBatch, Unconfirmed
from .batch import SMALL_BYTES, Row
from .connection import BrokerConnection, MaySend
from .outcome import PreparedMessage, PublishResult, decode_rows
from .redis_batch import RedisBatch
from .send_budget import rounds

logger = get_logger("outbox_app.drain")


class Publisher(BrokerConnection):
    def publish(
        self, rows: Sequence[Row], *, using: str, now: datetime, may_send: MaySend
    ) -> PublishResult:
        """Publish rows of the app in the given order. Their expiry is computed from ``now``.

        Each send calls ``may_send`` first, with the seconds that it wants; ``may_send`` returns the
        seconds that the send may take, or raises. An error is returned in the result and never
        raised, as the rows that the broker has taken by then have to be settled.
        """
        # For the steps of this publish; a publisher does one at a time.
        self._outcome = outcome = PublishResult(began=time.time_ns())
        self._may_send = may_send
        started = time.monotonic()
        self._fresh.clear()
        try:
            self._reopen(may_send)
            outcome.prepared = decode_rows(rows, self.app, now=now, outcome=outcome, using=using)
            ready = self._declare(outcome.prepared)
            self.open(may_send)
            if self._has_confirms:
                ready = list(self._with_mandatory(ready))
            if self._budget.failed:
                ready = self._budget.in_turn(item for item in ready if not self._gives_up(item))
            if self._takes_batches():
                self._publish_batches(ready)
            else:
                self._publish_singly(ready)
        except Exception as error:
            outcome.error = error
        outcome.seconds = time.monotonic() - started
        del self._outcome  # it holds the messages
        return outcome

    def waiting(self, queues: Iterable[str], *, may_send: MaySend) -> dict[str, int]:
        """Return how many messages wait in each queue. Raises ``BrokerUnavailable``."""
        self._reopen(may_send)
        channel = self.producer.channel
        try:
            return {queue: brokers.waiting(self.connection, channel, queue) for queue in queues}
        except Exception as error:
            self._fail(error, [])

    def send_events(self, outcome: PublishResult, keep_alive: Callable[[], object]) -> None:
        """Send Celery's monitors the events of accepted jobs, once their rows are settled."""
        wanted = [item for item in outcome.prepared if item.message.sent_event]
        for item in outcome.taken(wanted) if wanted else []:
            keep_alive()
            if self.producer is None:
                return
            message, row = item.message, item.row
            route = {"exchange": message.exchange, "routing_key": message.routing_key}
            event = {**(message.sent_event or {}), "queue": row.queue, **route}
            try:
                self.app.amqp._event_dispatcher.publish(  # type: ignore[attr-defined]
                    "task-sent", event, self.producer, retry=False
                )
            except SoftTimeLimitExceeded:  # of the task that this thread executes
                raise
            except Exception as error:  # an event is a courtesy; the job has left
                logger.warning(
                    "Event task-sent was not sent task_id=%s error=%s", row.task_id, error
                )
                self.close()

    def _declare(self, prepared: Iterable[PreparedMessage]) -> list[PreparedMessage]:
        """Declare each queue once per connection, and check routes that no broker checks."""
        ready = []
        checked: set[tuple[str, str]] = set()
        for item in prepared:
            route = item.message.exchange, item.message.routing_key
            is_declared = item.declare.keys() <= self._declared
            is_plain = not self._has_confirms or brokers.is_plain(item.row.envelope)
            if is_declared and route in checked and self.producer and is_plain:
                ready.append(item)  # like an earlier message of the batch
                continue
            if not is_declared:
                self._may_send(self.timeout)
            self.open(self._may_send)
            try:
                for name, declaration in item.declare.items():
                    self._declare_once(name, declaration)
                self.open()
                brokers.check_frame(self.connection, item.row.envelope, item.message)
                if route not in checked:
                    brokers.check_route(self.producer.channel, *route)
                    checked.add(route)
            except UnsafeBroker:
                raise
            except Exception as error:
                if self._is_row_error(error, item):
                    self._outcome.refuse(item.row, error)
                    if brokers.row_at_fault(error):
                        self.close()
                    continue
                self._fail(error, [])
            ready.append(item)
        return ready

    def _declare_once(self, name: str, declaration: Declaration) -> None:
        if name in self._declared:
            return
        self.open()
        try:
            entity = restore(declaration, self.app)
            self._exchanges = exchange_types([entity]) | self._exchanges
            entity(self.producer.channel).declare()
        except Exception as error:
            if self._is_lost(error) or not brokers.refuses_declaration(error, self.connection):
                raise
            # For example, the queue exists with other arguments, or the user may not declare it.
            # Publishing may still work: the broker tells for each message whether a queue took it.
            logger.warning(
                "Declaring failed, publishing all the same queue=%s error=%s", name, error
            )
            if self._has_confirms:  # RabbitMQ closes the channel
                declared = self._declared
                self.close()
                self._declared = declared
        self._declared.add(name)
        self._fresh.add(name)

    def _with_mandatory(self, items: Iterable[PreparedMessage]) -> Iterator[PreparedMessage]:
        for item in items:
            try:
                item.mandatory = needs_route(item.message, self._exchanges)
            except Exception as error:  # a damaged header may fail in any way
                self._outcome.refuse(item.row, error)
            else:
                yield item

    def _gives_up(self, item: PreparedMessage) -> bool:
        if error := self._budget.gives_up(item):
            self._outcome.refuse(item.row, error)
        return error is not None

    def _takes_batches(self) -> bool:
        # Other transports may take batches, but do not report the outcome of each message.
        if self._has_confirms:
            return hasattr(self.producer, "batch")  # since kombu 5.7
        is_redis = self.connection.transport.driver_type == "redis"
        return is_redis and getattr(self.producer, "supports_batch_publish", False)

    def _goes_alone(self, item: PreparedMessage) -> bool:
        """Return whether RabbitMQ is likely to close the channel because of a message."""
        return item.message.exchange not in self._known_exchanges or item.size > SMALL_BYTES

    def _publish_batches(self, ready: list[PreparedMessage]) -> None:
        dealt = [ready]
        keys = [item.row.ordering_key for item in ready if item.row.ordering_key]
        repeated = len(set(keys)) < len(keys)
        channel = self.producer.channel
        atomic = repeated and not self._has_confirms
        atomic = atomic and self._transactions.are_taken(channel, seconds=self.timeout)
        if repeated and not (atomic and outbox_settings().DEAD_KEY == "pass"):
            dealt = rounds(ready, atomic=atomic)
        alone = self._goes_alone if self._has_confirms else None
        for items in dealt:
            for batch in self._budget.batches(items, alone=alone):
                if len(batch) == 1 and self._has_confirms:
                    self._publish_singly(batch)
                else:
                    self._publish_batch(batch, atomic=atomic)

    def _publish_batch(self, items: list[PreparedMessage], *, atomic: bool) -> None:
        seconds = self._budget.seconds(items)
        seconds = min(seconds, self._may_send(seconds))
        self.open(self._may_send)
        channel = self.producer.channel
        batch: AmqpBatch | RedisBatch
        try:
            if self._has_confirms:
                batch = AmqpBatch(channel, seconds=seconds)
            else:
                batch = RedisBatch(channel, seconds=seconds, atomic=atomic)
        except Exception as error:  # it reconnects if the connection was lost
            self._fail(error, [])
        channel.create_publish_batch = lambda max_size: batch
        sent: list[PreparedMessage] = []
        failure: Exception | None = None
        began = time.monotonic()
        try:
            self._fill(batch, items, sent)
            if not batch.flushed:  # kombu has flushed it if its producer published a message
                batch.flush()
            batch.close()
        except Exception as error:  # the connection is dropped below
            failure = error
        answered = self._outcome.sort(sent, batch.answers, self._is_row_error)
        failure = failure or answered
        if isinstance(batch, RedisBatch) and batch.refusal is not None:
            self._transactions.were_refused(batch.refusal)
        if failure is None:
            self._budget.has_taken(sent, seconds=time.monotonic() - began)
            return
        if batch.begun and not brokers.refused_for_certain(failure):
            self._outcome.unknown += [item.row for item in sent[len(batch.answers) :]]
        if atomic and brokers.spans_slots(failure):
            self._transactions.were_refused(failure)
        if self._has_confirms and batch.begun and self._is_row_error(failure):
            # RabbitMQ closed the channel because of one message, and does not say which.
            self.close()
            ends = [(item, answers[-1]) for item, answers in zip(sent, batch.answers, strict=True)]
            again = [item for item, answer in ends if isinstance(answer, Unconfirmed)]
            self._publish_singly(again)
            # Nacked, or without a queue. The later jobs of these keys are in later rounds.
            failed = [end for end in ends if not isinstance(end[1], Unconfirmed | NoneType)]
            stay = [error for item, error in failed if not self._is_row_error(error, item)]
            if not stay:
                return
            failure = stay[0]
        self._fail(failure, sent if batch.begun else [])

    def _fill(
        self,
        batch: AmqpBatch | RedisBatch,
        items: list[PreparedMessage],
        sent: list[PreparedMessage],
    ) -> None:
        """Put messages into a batch and into ``sent``; refuse those that cannot be encoded."""
        with self.producer.batch(max_size=sys.maxsize):
            for item in items:
                if self._outcome.blocks(item.row):
                    continue
                try:
                    if not batch.takes(item):
                        self._send(item)
                except Exception as error:
                    if not self._is_row_error(error, item):
                        raise
                    self._outcome.refuse(item.row, error)
                else:
                    sent.append(item)

    def _publish_singly(self, prepared: Iterable[PreparedMessage]) -> None:
        outcome, left = self._outcome, deque(prepared)
        while left:
            item = left.popleft()
            if outcome.blocks(item.row) or self._gives_up(item):
                continue
            self._may_send(self._budget.seconds([item]))
            self._reopen(self._may_send)
            self._reconnect()
            self._returned = None
            began = time.monotonic()
            try:
                self._send(item)
                if self._returned is not None:
                    raise self._returned
            except Exception as error:
                if self._returned is None:
                    self.close()
                if self._is_row_error(error, item):
                    outcome.refuse(item.row, error)
                    if not self._has_confirms:
                        # On a new connection a transport that routes in the client knows no
                        # exchange yet, and would drop messages that are sent to one.
                        left = deque(self._declare(left))
                    continue
                # One of several queues may have taken it.
                at_once = isinstance(error, AccessRefused) or brokers.has_no_route(error)
                fanned_out = item.message.exchange and not at_once
                if fanned_out or not brokers.refused_for_certain(error):
                    outcome.unknown.append(item.row)
                self._fail(error, [item])
            outcome.accepted.append(item.row)
            self._known_exchanges.add(item.message.exchange)
            self._budget.has_taken([item], seconds=time.monotonic() - began)
