"""The retention beside other loops: it removes old rows of the core and of all capabilities.

One process at a time does this, by a lease; two at once would only remove the same rows. Drainers
remove the counters of their databases. ``outbox_prune`` removes fences, which are in the databases
of senders, and events that an archive outside SINK has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import django.db
from django.db import connections

from ..capability import all_doors
from ..exceptions import OutboxError
from ..process.foreground import Listen
from ..process.loop import ONCE_FAILURES, LeasedLoop
from ..text import error_text, get_logger

logger = get_logger("outbox_app.retention")

#: Seconds after which a statement without an answer is cut off.
ANSWER_SECONDS = 300.0


class Retention(LeasedLoop):
    """Removes old rows of the outbox on ``using``, of the inbox, and of the logs."""

    resource = "retention"
    done = 0
    #: Seconds between two runs.
    rest = 3600.0

    def __init__(self, *, using: str, **options: Any) -> None:
        options |= {"answer_seconds": ANSWER_SECONDS, "logger": logger}
        super().__init__(resource=self.resource, parts=1, using=using, **options)
        elsewhere = {alias for doors in all_doors() for alias in doors.aliases()} - {using}
        self._watchdog.beside = [alias for alias in connections if alias in elsewhere]
        #: The remaining steps of the run in progress.
        self._work: Iterator[None] | None = None
        self._next = float("-inf")
        #: By kind of rows, the error of the last run.
        self._faults: dict[str, str] = {}
        #: Who still needs the next of the old events.
        self._held = ""

    @property
    def trouble(self) -> str:
        return "; ".join(filter(None, [self.backoff.text, *self._faults.values(), self._held]))

    @property
    def has_failed(self) -> bool:
        return bool(self.backoff.text or self._faults)

    def _turn(self) -> bool:
        self._share()
        if not self.holder.owned:
            self._work, self._held = None, ""  # another process knows what holds now
            self._faults.clear()
        elif self._work is None and time.monotonic() >= self._next:
            self._work = self._prune()
        work, self._work = self._work, None  # after a failed step the run starts again
        if work is None:
            return False
        if next(work, True):
            self._next = time.monotonic() + self.rest
            self.holder.beat(done=self.done, trouble=self.trouble)
            return False
        self._work = work
        return True

    def _prune(self) -> Iterator[None]:
        """Remove old rows of all capabilities, one kind in each step; yield None after each step.

        A kind that cannot be removed is logged, and does not stop the other kinds.
        """
        removals: dict[str, Callable[..., int]] = {}
        for doors in all_doors():
            removals |= doors.removals(self.using)
        for kind, remove in removals.items():
            self._faults.pop(kind, None)
            try:
                removed = remove(write=logger.debug)
            except (OutboxError, django.db.Error) as error:
                removed, fault = 0, error_text(error)
                self._faults[kind] = f"{kind}: {fault}"
                logger.error("Old rows were not removed kind=%s error=%s", kind, fault)
                if isinstance(error, django.db.Error):
                    self._disconnect()
            self.done += removed
            if removed:
                logger.info("Old rows removed kind=%s rows=%d", kind, removed)
            yield

    def _is_finished(self, busy: bool | None, *, once: bool) -> bool:
        return once and not busy and not 0 < self.backoff.failures < ONCE_FAILURES

    def _pause(self) -> float:
        return self.backoff.remaining or self.holder.beat_seconds


def retain_here(make: Callable[[], Retention], *, once: bool, listen: Listen) -> int:
    """Run a retention in this thread; ``listen`` gets the function that stops it."""
    loop = make()
    listen(loop.stop)
    logger.info("Retention started resource=%s database=%s", loop.resource, loop.using)
    removed = loop.run(once=once)
    logger.info("Retention stopped resource=%s removed=%d", loop.resource, removed)
    return int(once and loop.has_failed)
