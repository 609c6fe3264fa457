"""The retention beside other loops: once an hour what was kept long enough is removed.

One process at a time does it, by a lease, and another takes over when that has run out; two at once
would only remove the same rows. Counters go by the drainer; fences, which are in the databases of
senders, and archived events take ``outbox_prune``. A kind that cannot be removed is logged, and
stops no other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from ..conf import outbox_settings
from ..exceptions import OutboxError
from ..process.backoff import Backoff, described
from ..process.foreground import Listen
from ..process.lease import BEATS, LeaseHolder
from ..process.loop import ProcessLoop
from ..process.waiting import PollWaiter
from ..text import get_logger
from .events import prune_events
from .prune import prune

logger = get_logger("outbox_app.retention")

#: Seconds between two runs.
PAUSE = 3600.0
#: A statement that gets no answer for so many seconds is cut off.
ANSWER_SECONDS = 300.0


class Retention(ProcessLoop):
    """Removes old rows of the outbox on ``using``, of the inbox, and of the logs."""

    def __init__(self, *, using: str, lease_seconds: float | None = None) -> None:
        self.lease_seconds = lease_seconds or outbox_settings().LEASE_SECONDS
        super().__init__(
            using=using,
            interval=self.lease_seconds / BEATS,
            answer_seconds=ANSWER_SECONDS,
            channel="",
            on_turn=None,
            logger=logger,
        )
        self._waiter = PollWaiter(self._stop)  # nothing wakes it
        self.holder = LeaseHolder(
            using=using, lease_seconds=self.lease_seconds, resource="retention", parts=1
        )
        self.backoff = Backoff("database", logger)
        self._removed = 0
        self._next = float("-inf")
        #: By kind, why it was not removed the last time.
        self._faults: dict[str, str] = {}

    @property
    def done(self) -> int:
        return self._removed

    @property
    def trouble(self) -> str:
        faults = [f"{kind}: {fault}" for kind, fault in self._faults.items()]
        return "; ".join(filter(None, [self.backoff.text, *faults]))

    def run(self, *, once: bool = False) -> int:
        """Run until ``stop()``, or ``once``; return how many rows were removed."""
        self._loop(once=once)
        return self.done

    def _step(self, *, once: bool) -> bool | None:
        return self._run_or_back_off(self._turn, self.backoff)  # type: ignore[no-any-return]

    def _turn(self) -> bool:
        holder = self.holder
        if holder.joined and holder.beat_is_due():
            holder.beat(done=self.done, trouble=self.trouble)
        if holder.sharing_is_due():
            (holder.rebalance if holder.joined else holder.join)()
        if holder.owned and time.monotonic() >= self._next:
            self._prune()
            self._next = time.monotonic() + PAUSE
        return False

    def _prune(self) -> None:
        for kind, remove in self._kinds():
            if self._stop.is_set():
                return
            self._faults.pop(kind, None)
            try:
                removed = remove()
            except OutboxError as error:
                self._faults[kind] = described(error)
                logger.error("Not removed kind=%s error=%s", kind, self._faults[kind])
                continue
            self._removed += removed
            if removed:
                logger.info("Removed kind=%s rows=%d", kind, removed)
            self.holder.beat(done=self.done, trouble=self.trouble)

    def _kinds(self) -> Iterator[tuple[str, Callable[[], int]]]:
        for kind in ("incidents", "results", "prepared"):
            yield kind, lambda kind=kind: prune(kind, self.using, write=logger.debug)  # type: ignore[misc]
        yield "inbox", lambda: prune("inbox", write=logger.debug)
        if outbox_settings().EVENT_RETENTION_DAYS is not None:
            yield "events", lambda: prune_events(write=logger.debug)

    def _is_finished(self, busy: bool | None, *, once: bool) -> bool:
        return once and busy is not None

    def _pause(self) -> float:
        return self.backoff.remaining or self.interval

    def _leave(self) -> None:
        if self.holder.joined:
            self._hand_back(self.holder.leave, self.backoff)


def retain_here(using: str, *, once: bool, listen: Listen) -> int:
    """Run the retention in this thread; ``listen`` is given what stops it."""
    loop = Retention(using=using)
    listen(loop.stop)
    logger.info("Retention started database=%s", using)
    removed = loop.run(once=once)
    logger.info("Retention stopped removed=%d", removed)
    return int(once and bool(loop.trouble))
