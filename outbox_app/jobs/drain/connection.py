"""The drain's own connection to the broker of one Celery app, made anew after every error.

Every wait on it is bounded. It refuses a broker that is configured to lose messages, and probes a
broker after a failed send. For each error it decides whether the row or the broker is at fault.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NoReturn

import amqp
from celery import Celery
from kombu import Producer
from kombu.exceptions import OperationalError

from ...exceptions import BrokerUnavailable
from ...text import get_logger
from ..exchanges import declare_exchanges
from . import brokers
from .misconfiguration import WRONG_OPTION, broker_at, find_transport, unreachable
from .outcome import PreparedMessage
from .redis_batch import Transactions
from .send_budget import SendBudget

logger = get_logger("outbox_app.drain")

#: See ``Publisher.publish``.
MaySend = Callable[..., float]


class BrokerConnection:
    def __init__(self, app: Celery, *, timeout: float) -> None:
        self.app = app
        self.timeout = timeout
        self.connection: Any = None
        self.producer: Any = None
        #: Names declared on this connection, and those declared since the last publish began.
        self._declared: set[str] = set()
        self._fresh: set[str] = set()
        self._returned: Exception | None = None
        #: The types of the exchanges that are known here: see ``exchange_types``.
        self._exchanges: dict[str, str] = {}
        self._has_confirms = False
        #: Exchanges that have taken a message on this connection.
        self._known_exchanges: set[str] = set()
        #: Whether the last send failed, so that the broker is probed: see ``brokers.probe``.
        self._doubtful = False
        self._budget = SendBudget(timeout=timeout)
        self._transactions = Transactions()

    def open(self, keep_alive: Callable[[], object] = lambda: None) -> None:
        if self.producer is not None:
            return
        app, timeout = self.app, self.timeout
        driver_type = find_transport(app).driver_type
        self.connection = connection = app.connection_for_write(
            connect_timeout=timeout,
            transport_options=brokers.transport_options(app, driver_type, timeout),
        )
        try:
            connection.ensure_connection(
                errback=lambda *_: keep_alive(),  # type: ignore[arg-type]  # its result is unused
                max_retries=max(0, len(connection.alt) - 1),
                interval_start=0,
                interval_step=0,
            )
            channel = connection.channel()
            brokers.refuse_unsafe(connection, channel)
            if self._doubtful and brokers.probe(connection, channel, timeout=timeout):
                self._budget.has_probed()
            self._doubtful = False
            if driver_type == "redis":
                # A declaration would ask for the size in a MULTI, which Redis may refuse.
                channel._size = lambda queue: 0  # type: ignore[attr-defined]
        except BaseException as error:
            unavailable = self._is_lost(error) or brokers.broker_at_fault(error)
            self.close()
            if unavailable or isinstance(error, WRONG_OPTION):
                raise unreachable(app, error) from error
            raise
        self._has_confirms = isinstance(channel, amqp.Channel)
        self._exchanges |= declare_exchanges(app, channel)
        heard: Any = {"on_return": self._on_return} if hasattr(channel, "events") else {}
        self.producer = Producer(channel, auto_declare=False, **heard)

    def close(self) -> None:
        """Drop the connection without notice to the broker."""
        connection, self.connection, self.producer = self.connection, None, None
        self._declared, self._known_exchanges = set(), set()
        if connection is not None:
            try:
                connection.collect()
            except Exception as error:  # a broken connection may fail in any way
                logger.debug("Dropping a connection failed error=%s", error)

    def _reopen(self, keep_alive: Callable[[], object]) -> None:
        if brokers.has_ended(self.connection):
            self.close()
        self.open(keep_alive)

    def _reconnect(self) -> None:
        """Fail before a message is sent if Redis is away: the message is not in doubt then."""
        try:
            brokers.reconnect(self.connection, self.producer.channel)
        except Exception as error:
            self._fail(error, [])

    def _send(self, item: PreparedMessage) -> None:
        bounds = {"timeout": self.timeout, "confirm_timeout": self.timeout}
        self.producer.publish(item.row.body, mandatory=item.mandatory, **bounds, **item.options)

    def _on_return(self, error: Exception, exchange: str, routing_key: str, message: Any) -> None:
        # RabbitMQ returns an unroutable message before it confirms it.
        self._returned = error

    def _fail(self, error: Exception, items: list[PreparedMessage]) -> NoReturn:
        """Drop the connection after a failure of the broker, and raise ``BrokerUnavailable``."""
        answer = None if self._is_lost(error) else error
        if answer is None or brokers.is_foreign(answer) or len(items) > 1:
            self._budget.has_failed(items, answer)
        self._doubtful = True
        self.close()
        if isinstance(error, BrokerUnavailable):
            raise error
        # Not the repr of the error: redis-py's leaves out the message.
        what = f"{broker_at(self.app)} failed"
        raise BrokerUnavailable(f"{what}: {type(error).__name__}: {error}") from error

    def _is_row_error(self, error: BaseException, item: PreparedMessage | None = None) -> bool:
        """Return whether the row is at fault: the broker answers, and could take other rows."""
        if item and brokers.has_no_route(error) and not item.declare.keys() <= self._fresh:
            return False  # the queue was deleted meanwhile: the next connection declares it
        is_brokers = self._is_lost(error) or brokers.broker_at_fault(error)
        return brokers.row_at_fault(error) or not is_brokers

    def _is_lost(self, error: BaseException) -> bool:
        connection = self.connection or self.app.connection_for_write()
        # kombu counts KeyError among the connection errors of Redis; here a row causes it.
        lost = tuple(e for e in connection.connection_errors if not issubclass(e, LookupError))
        return isinstance(error, (*lost, OSError, OperationalError, BrokerUnavailable))
