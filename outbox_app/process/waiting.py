"""How an idle process waits: by LISTEN on PostgreSQL, by polling elsewhere.

LISTEN needs a session of its own. Behind a pooler in transaction mode it receives nothing, without
an error. So a listener tests itself with a NOTIFY. If it does not hear that, it is given up for a
while, and the process polls at its interval. A wake-up is only a hint: without it the process reads
the same rows, later.
"""

from __future__ import annotations

import queue
import time
from contextlib import suppress
from uuid import uuid4

import django.db
from django.db import connections

from ..conf import outbox_settings
from ..database.watchdog import Watchdog
from ..text import get_logger

logger = get_logger("outbox_app.drain")

#: The default seconds between two polls: if commits wake the reader, and if they do not.
WOKEN_INTERVAL, POLL_INTERVAL = 1.0, 0.1
#: Longest uninterrupted wait for a NOTIFY, in seconds: a stop is noticed within it.
SLICE = 0.25
#: Seconds in which a listener must hear its own test.
TEST_SECONDS = 2.0
#: Seconds after which a listener is tested again, and a failed one is set up again.
RETRY_SECONDS = 60.0


class StopFlag:
    """A flag that a thread can wait for, and that a signal handler may set.

    ``threading.Event`` is unfit: ``set()`` takes a lock that the interrupted thread may hold.
    """

    def __init__(self) -> None:
        self._at: float | None = None
        self._bell: queue.SimpleQueue[None] = queue.SimpleQueue()

    def set(self) -> None:
        if self._at is None:
            self._at = time.monotonic()
        self._bell.put(None)

    def is_set(self) -> bool:
        return self._at is not None

    def is_set_for(self, seconds: float) -> bool:
        return self._at is not None and time.monotonic() - self._at >= seconds

    def wait(self, seconds: float) -> bool:
        """Wait until the flag is set, for at most so many seconds; return whether it is set."""
        if not self.is_set():
            with suppress(queue.Empty):
                self._bell.get(timeout=max(0.0, seconds))
        return self.is_set()


class PollWaiter:
    def __init__(self, stop: StopFlag) -> None:
        self.stop = stop

    def wait(self, seconds: float) -> bool:
        """Wait for so many seconds, or until the stop. Return False: nothing wakes it."""
        self.stop.wait(seconds)
        return False

    def fault(self) -> str:
        """Return why nothing wakes it although LISTEN is there; empty if LISTEN is not."""
        return ""

    def close(self) -> None:
        """Nothing to close."""


class NotifyWaiter(PollWaiter):
    """Waits for NOTIFY on a connection of its own, and polls while that does not work."""

    def __init__(self, stop: StopFlag, *, using: str, watchdog: Watchdog, channel: str) -> None:
        super().__init__(stop)
        self.using = using
        self.channel = channel
        self.watchdog = watchdog
        #: When to test the listener (again).
        self._test_at = 0.0
        #: The payload that the current test has to hear, and until when; empty once it was heard.
        self._token = ""
        self._hear_until = 0.0

    def wait(self, seconds: float) -> bool:
        """Wait for a wake-up, for at most so many seconds; return whether one came."""
        from psycopg import Error as DriverError

        until = time.monotonic() + seconds
        try:
            if time.monotonic() >= self._test_at:
                with self.watchdog.busy():
                    self._test()
            while self.watchdog.listener is not None and not self.stop.is_set():
                left = max(0.0, until - time.monotonic())
                if self._is_woken(min(left, SLICE)):
                    return True
                if not left:
                    return False
        except (django.db.Error, DriverError) as error:
            self._give_up(error)
        return super().wait(until - time.monotonic())

    def fault(self) -> str:
        """Test LISTEN once; return why it does not work, or an empty string."""
        from psycopg import Error as DriverError

        try:
            self._test()
            while self._token:
                self._is_woken(SLICE)
        except (django.db.Error, DriverError) as error:
            return str(error).strip()
        finally:
            self.close()
        return ""

    def close(self) -> None:
        connection, self.watchdog.listener = self.watchdog.listener, None
        if connection is not None:
            connection.close()

    def _test(self) -> None:
        """Listen on a new connection, and send it a NOTIFY that it has to hear."""
        self.close()
        self._test_at = time.monotonic() + RETRY_SECONDS
        connection = connections.create_connection(self.using)
        connection.settings_dict = connections[self.using].settings_dict  # with its timeouts
        self.watchdog.listener = connection
        connection.connect()
        with connection.cursor() as cursor:
            cursor.execute(f"LISTEN {self.channel}")
        self._token = uuid4().hex
        self._hear_until = time.monotonic() + TEST_SECONDS
        # Another session sends it: even behind a pooler a session may hear its own NOTIFY.
        with connections[self.using].cursor() as cursor:
            cursor.execute("SELECT pg_notify(%s, %s)", [self.channel, self._token])

    def _is_woken(self, seconds: float) -> bool:
        notifies = self.watchdog.listener.connection.notifies
        heard: list[str] = []
        # Wait for one, and then take all that have arrived in the meantime.
        while more := list(notifies(timeout=0 if heard else seconds, stop_after=1)):
            heard += [notice.payload for notice in more]
        if self._token in heard:
            self._token = ""
        elif self._token and time.monotonic() > self._hear_until:
            raise django.db.OperationalError(
                "a NOTIFY was not heard; is there a pooler in transaction mode?"
            )
        # The NOTIFY of a test has a payload (other processes test, too), that of a commit has none.
        return "" in heard

    def _give_up(self, error: Exception) -> None:
        text = "LISTEN does not work, polling instead database=%s retry_seconds=%d reason=%s"
        logger.warning(text, self.using, RETRY_SECONDS, error)
        self._token = ""
        self.close()


def poll_interval(chosen: float | None, *, using: str) -> float:
    """Return the chosen interval in seconds, or the default: longer if commits wake the reader."""
    if chosen is not None:
        return chosen
    return WOKEN_INTERVAL if outbox_settings().WAKE and _listens(using) else POLL_INTERVAL


def waiter(stop: StopFlag, *, using: str, watchdog: Watchdog, channel: str) -> PollWaiter:
    """Return the waiter that the database of ``using`` supports; without a channel it polls."""
    if channel and _listens(using):
        return NotifyWaiter(stop, using=using, watchdog=watchdog, channel=channel)
    if channel and has_old_driver(using):
        logger.warning("psycopg 3 is not installed, polling instead of LISTEN database=%s", using)
    return PollWaiter(stop)


def has_old_driver(using: str) -> bool:
    """Return whether Django speaks to PostgreSQL by psycopg2, which hears no NOTIFY here."""
    if connections[using].vendor != "postgresql":
        return False
    from django.db.backends.postgresql import psycopg_any

    return not psycopg_any.is_psycopg3


def _listens(using: str) -> bool:
    return connections[using].vendor == "postgresql" and not has_old_driver(using)
