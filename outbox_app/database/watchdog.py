"""A time limit for every statement: a database that stops answering must not stop the drain.

Brokers have socket timeouts; most database drivers have none for the answer to a statement, and a
network that drops packets would hold a drainer for many minutes. A thread watches that statements
end. If one takes longer than the lease (by then the shards are lost anyway), the thread shuts the
sockets down: the driver raises, and the drain reconnects.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

from django.db import connections

from ..text import get_logger

logger = get_logger("outbox_app.drain")

#: Methods that wait for the database without executing a statement through Django.
_ENDS = ("_commit", "_rollback")


class Watchdog:
    """Watches the connection to ``using`` of the thread that calls ``watching``."""

    def __init__(self, *, using: str, limit: float) -> None:
        self.using = using
        self.connection: Any = None
        #: Other aliases whose statements are watched, too.
        self.beside: list[str] = []
        #: The connection that listens. It is cut, too.
        self.listener: Any = None
        self.limit = limit
        self._since: float | None = None
        #: The connection of the last statement, its socket, and the driver's connection.
        self._last: Any = None
        self._socket: int | None = None
        self._driver: Any = None
        self._ended = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        self.connection = self._last = connections[self.using]
        self._ended.clear()
        threading.Thread(target=self._watch, name="outbox-watchdog", daemon=True).start()
        own = vars(self.connection)
        before = {name: own[name] for name in _ENDS if name in own}
        own |= {n: partial(self._around_statement, getattr(self.connection, n)) for n in _ENDS}
        try:
            with ExitStack() as stack:
                for alias in (self.using, *self.beside):
                    watched = connections[alias].execute_wrapper(self._around_statement)
                    stack.enter_context(watched)
                yield
        finally:
            for name in _ENDS:
                own.pop(name, None)
            own |= before
            self._ended.set()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Expect the database to answer inside the block."""
        before, self._since = self._since, time.monotonic()
        try:
            yield
        finally:
            self._since = None if before is None else time.monotonic()

    def _around_statement(self, execute: Callable[..., Any], *args: Any) -> Any:
        self._last = args[-1]["connection"] if args else self.connection
        # Read here: while a statement runs, some drivers do not tell another thread the socket.
        self._socket, self._driver = _socket_of(self._last), self._last.connection
        with self.busy():
            return execute(*args)

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self.limit / 4)):
            since = self._since
            if since is not None and time.monotonic() - since > self.limit:
                self._since = None
                logger.error("Database does not answer, cutting connections after=%.1f", self.limit)
                # During a reconnect the number of the old socket may belong to another file.
                own = self._socket if self._driver is self._last.connection else None
                for number in (own, _socket_of(self.listener)):
                    if number is not None:
                        _cut(number)


def _socket_of(connection: Any) -> int | None:
    try:
        return int(connection.connection.fileno())
    except Exception:  # not connected, or a driver without a socket (SQLite)
        return None


def _cut(number: int) -> None:
    try:
        with socket.socket(fileno=os.dup(number)) as duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)
    except OSError as error:  # closed in the meantime
        logger.debug("Socket was cut already error=%s", error)
