"""A bound for every statement: a database that stops answering must not stop the drain.

Brokers have socket timeouts; most database drivers have none for the answer to a statement, and a
network that swallows packets would hold a drainer for many minutes. While a turn runs, a thread
watches that it gets on. When a statement takes longer than the lease (by then the shards are lost
anyway) the connection's socket is shut
down: the driver raises, and the drain reconnects.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from django.db import connections

logger = logging.getLogger("outbox_app.drain")


class Watchdog:
    """Watches the connection that the calling thread has to ``using``.

    Args:
        using: Database alias.
        limit: Seconds without progress after which the connection is cut.
    """

    def __init__(self, *, using: str, limit: float) -> None:
        self.connection = connections[using]
        self.limit = limit
        self._touched: float | None = None
        self._ended = threading.Event()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch for as long as the block runs."""
        threading.Thread(target=self._watch, name="outbox-watchdog", daemon=True).start()
        try:
            with self.connection.execute_wrapper(self._around_statement):
                yield
        finally:
            self._ended.set()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Expect progress inside the block."""
        self.touch()
        try:
            yield
        finally:
            self._touched = None

    def touch(self) -> None:
        """Note that something got on."""
        self._touched = time.monotonic()

    def _around_statement(self, execute: Callable[..., Any], *args: Any) -> Any:
        if self._touched is not None:
            self.touch()
        return execute(*args)

    def _watch(self) -> None:
        while not self._ended.wait(min(1.0, self.limit / 4)):
            touched = self._touched
            if touched is not None and time.monotonic() - touched > self.limit:
                self._touched = None
                self._cut()

    def _cut(self) -> None:
        logger.error("Database does not answer, cutting its connection seconds=%.1f", self.limit)
        raw = self.connection.connection
        try:
            duplicate = socket.socket(fileno=os.dup(raw.fileno()))
        except Exception as error:  # not connected, or a driver without a socket (SQLite)
            logger.warning("No socket to cut error=%r", error)
            return
        with duplicate:
            duplicate.shutdown(socket.SHUT_RDWR)
