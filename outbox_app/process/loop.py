"""The loop of a long-running process: work, report, wait to be woken, until it is stopped.

The database may become unavailable at any point: the process backs off, and recovers when it is
back. A process that stops hands its leases back; if the database is unavailable then, they expire.
"""

from __future__ import annotations

import gc
import logging
import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import django.db
from django.db import close_old_connections, connections

from ..conf import outbox_settings
from ..database.watchdog import Watchdog
from ..exceptions import LeaseLost, UnfitSession
from .backoff import Backoff
from .lease import LeaseHolder
from .waiting import StopFlag, poll_interval, waiter
from .wakeup import LINGER

#: Failures of the database in a row after which a run with ``once`` gives up.
ONCE_FAILURES = 5


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause the cyclic garbage collector for the block.

    A batch has thousands of objects and no cycle: scanning them costs a tenth of its time.
    """
    if not gc.isenabled():  # the project's choice, or the block of another thread
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def require_no_transaction(using: str) -> None:
    """Refuse to run inside a caller's transaction, where a loop sees what is not committed."""
    connection: Any = connections[using]
    if blocks := connection.atomic_blocks:
        opened = not blocks[0]._from_testcase
    else:
        opened = connection.connection is not None and not connection.autocommit
    if opened:
        raise UnfitSession(
            f"A transaction is open on {using!r}: its rows would be sent or handled before its "
            "commit, and in spite of a rollback. Call this outside atomic(), with autocommit on."
        )


class ProcessLoop(ABC):
    """Base of the loops of the drain, the subscriptions and the ``LeasedLoop``s."""

    #: Errors after which the loop backs off and tries again; any other error ends it.
    expected: tuple[type[Exception], ...] = (django.db.Error, LeaseLost)

    def __init__(
        self,
        *,
        using: str,
        interval: float | None = None,
        answer_seconds: float,
        channel: str,
        on_turn: Callable[[Any], None] | None = None,
        logger: logging.Logger,
    ) -> None:
        self.using = using
        self.interval = poll_interval(interval, using=using)
        self.on_turn = on_turn
        self.logger = logger
        self._stop = StopFlag()
        self._watchdog = Watchdog(using=using, limit=answer_seconds)
        self._waiter = waiter(self._stop, using=using, watchdog=self._watchdog, channel=channel)

    def __str__(self) -> str:
        return f"{socket.gethostname()}:{os.getpid()}"

    @property
    @abstractmethod
    def done(self) -> int:
        """The number of jobs that were published, or of events that were handled."""

    @property
    @abstractmethod
    def trouble(self) -> str:
        """The errors that the loop waits out; empty when all is well."""

    def report(self, message: str, *values: Any) -> None:
        """Log a record, with any trouble at its end."""
        if trouble := self.trouble:
            message, values = f"{message} trouble=%s", (*values, trouble)
        self.logger.info(message, *values)

    def stop(self) -> None:
        """Finish the work in progress and end. Any thread or signal handler may call this."""
        self._stop.set()

    @abstractmethod
    def _step(self, *, once: bool) -> bool | None:
        """Work once; return whether there may be more work, or None after an expected error."""

    @abstractmethod
    def _is_finished(self, busy: bool | None, *, once: bool) -> bool:
        """Return, after a step, whether the loop ends by itself."""

    @abstractmethod
    def _pause(self) -> float:
        """Return for how many seconds the loop waits when there is nothing to do."""

    @abstractmethod
    def _leave(self) -> None:
        """Hand the leases back; called once, at the end."""

    def run(self, *, once: bool = False) -> Any:
        """Run until ``stop()``; with ``once``, until there is nothing to do. Return ``done``."""
        require_no_transaction(self.using)
        with self._watchdog.watching():
            try:
                self._turns(once=once)
            finally:
                # A supervisor kills a process that takes long to end.
                lease = outbox_settings().LEASE_SECONDS
                self._watchdog.limit = min(self._watchdog.limit, lease)
                self._waiter.close()
                self._leave()
        return self.done

    def _turns(self, *, once: bool) -> None:
        linger: Iterator[float] = iter(())
        while not self._stop.is_set():
            busy = self._step(once=once)
            if self.on_turn:
                self._ignore_database_errors(self.on_turn, self)
            if self._is_finished(busy, once=once):
                break
            if busy is None:  # the database may be unavailable, so do not listen
                self._stop.wait(self._pause())
            # A busy loop does not wait, but reads what has come: PostgreSQL keeps unread NOTIFYs.
            elif self._waiter.wait(0 if busy else next(linger, None) or self._pause()) or busy:
                linger = iter(LINGER)

    def _run_or_back_off(self, step: Callable[[], Any], backoff: Backoff) -> Any:
        """Run a step; return None if it failed because of the database or a lost lease."""
        try:
            result = step()
        except self.expected as error:
            backoff.failed(error)
            if not isinstance(error, LeaseLost):
                self._disconnect()
            return None
        backoff.succeeded()
        return result

    def _hand_back(self, step: Callable[[], Any], backoff: Backoff) -> bool:
        """Run the step that hands leases back, again if it failed on a connection that had died."""
        return any(self._ignore_database_errors(step) for _ in range(1 if backoff.text else 2))

    def _ignore_database_errors(self, step: Callable[..., Any], *args: Any) -> bool:
        try:
            step(*args)
        except (django.db.Error, LeaseLost) as error:
            name = getattr(step, "__name__", type(step).__name__)
            self.logger.warning("Step failed what=%s step=%s error=%s", self, name, error)
            self._disconnect()
            return False
        return True

    def _disconnect(self) -> None:
        connections[self.using].close()
        close_old_connections()  # such as a replica's


class LeasedLoop(ProcessLoop):
    """A loop whose processes share the parts of a resource by leases. It is not woken: it polls."""

    def __init__(
        self, *, resource: str, parts: int, lease_seconds: float | None = None, **options: Any
    ) -> None:
        super().__init__(channel="", **options)
        self.holder = LeaseHolder(
            using=self.using,
            lease_seconds=lease_seconds or outbox_settings().LEASE_SECONDS,
            resource=resource,
            parts=parts,
        )
        self.backoff = Backoff("database", self.logger)

    @abstractmethod
    def _turn(self) -> bool:
        """Work once; return whether there may be more work."""

    def _step(self, *, once: bool) -> bool | None:
        return self._run_or_back_off(self._turn, self.backoff)  # type: ignore[no-any-return]

    def _share(self) -> bool:
        """Renew the lease when due; share the parts when due, and return whether that was done."""
        holder = self.holder
        if holder.joined and holder.beat_is_due():
            holder.beat(done=self.done, trouble=self.trouble)
        if is_due := holder.sharing_is_due():
            holder.share()
        return is_due

    def _leave(self) -> None:
        if self.holder.joined:
            self._hand_back(self.holder.leave, self.backoff)
