"""How an idle drainer waits: by LISTEN on PostgreSQL, by the clock elsewhere.

LISTEN needs a session of its own; behind a pooler in transaction mode it hears nothing and says
nothing. So a
listener tests itself with a NOTIFY of its own, and one that hears nothing is given up for a while:
    the drain then polls at its interval. A wake-up is a hint; what is read does not depend on it.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import Any
from uuid import uuid4

import django.db
from django.db import connections

from ..intake.wake import CHANNEL

logger = logging.getLogger("outbox_app.drain")

#: Longest uninterrupted wait, in seconds: a stop is noticed within it.
SLICE = 0.25
#: Seconds in which a listener must hear its own test.
TEST_SECONDS = 2.0
#: Seconds after which a listener is tested again, and one that failed is tried again.
RETRY_SECONDS = 60.0


class Clock:
    """Waits by the clock."""

    def __init__(self, stop: threading.Event) -> None:
        self.stop = stop

    def wait(self, seconds: float) -> bool:
        """Wait for so long, or until the stop. Says whether something woke it: never."""
        self.stop.wait(seconds)
        return False

    def close(self) -> None:
        """Nothing to close."""


class Listener(Clock):
    """Waits for NOTIFY on a connection of its own, and by the clock while that does not work.

    Args:
        stop: Ends every wait.
        using: Alias whose connection settings are used.
    """

    def __init__(self, stop: threading.Event, *, using: str) -> None:
        super().__init__(stop)
        self.using = using
        self._connection: Any = None
        #: When to test the listener (again).
        self._test_at = 0.0

    def wait(self, seconds: float) -> bool:
        """Wait for a wake-up, for at most so many seconds. Says whether one came."""
        until = time.monotonic() + seconds
        try:
            if time.monotonic() >= self._test_at:
                self._listen()
            if self._connection is None:
                return super().wait(seconds)
            while not self.stop.is_set():
                left = until - time.monotonic()
                if left <= 0:
                    return False
                if self._hears(min(left, SLICE)):
                    return True
        except (django.db.Error, self._driver_error()) as error:
            self._give_up(repr(error))
            return super().wait(max(0.0, until - time.monotonic()))
        return False

    def close(self) -> None:
        """Close the listening connection."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _listen(self) -> None:
        self.close()
        self._test_at = time.monotonic() + RETRY_SECONDS
        connection = connections.create_connection(self.using)
        connection.connect()
        self._connection = connection
        token = uuid4().hex
        with connection.cursor() as cursor:
            cursor.execute(f"LISTEN {CHANNEL}")
        # Sent by another session: a pooler may well show a session its own notices.
        with connections[self.using].cursor() as cursor:
            cursor.execute("SELECT pg_notify(%s, %s)", [CHANNEL, token])
        until = time.monotonic() + TEST_SECONDS
        while not self.stop.is_set():
            if token in [notice.payload for notice in self._notices(SLICE)]:
                return
            if time.monotonic() > until:
                self._give_up("a NOTIFY was not heard; is there a pooler in transaction mode?")
                return

    def _hears(self, seconds: float) -> bool:
        return bool(self._notices(seconds))

    def _notices(self, seconds: float) -> list[Any]:
        return list(self._connection.connection.notifies(timeout=seconds, stop_after=1))

    def _give_up(self, why: str) -> None:
        logger.warning(
            "LISTEN does not work, polling instead database=%s retry_seconds=%d reason=%s",
            self.using,
            RETRY_SECONDS,
            why,
        )
        self.close()

    @staticmethod
    def _driver_error() -> type[Exception]:
        from psycopg import Error

        return Error


def waiter(stop: threading.Event, *, using: str) -> Clock:
    """Return the way of waiting that the database of ``using`` offers."""
    if connections[using].vendor == "postgresql":
        from django.db.backends.postgresql.psycopg_any import is_psycopg3

        if is_psycopg3:
            return Listener(stop, using=using)
    return Clock(stop)
