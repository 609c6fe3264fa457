"""The retention beside other loops: once an hour what was kept long enough is removed.

``Sink`` removes what the setting SINK names, all the time, from logs whose archive holds it.

One process at a time does it, by a lease, and another takes over when that has run out; two at once
would only remove the same rows. Counters go by the drainer; fences, which are in the databases of
senders, and archived events take ``outbox_prune``. A kind that cannot be removed is logged, and
stops no other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from ..conf import outbox_settings
from ..eventlog.registry import sinks
from ..exceptions import OutboxError
from ..pipeline.driver.archive_lookup import ArchiveLookup
from ..process.backoff import Backoff, described
from ..process.foreground import Listen
from ..process.lease import BEATS, LeaseHolder
from ..process.loop import ProcessLoop
from ..process.waiting import PollWaiter
from ..text import get_logger
from .events import TOO_YOUNG, prune_events, prune_steps
from .prune import BATCH_SIZE, prune

logger = get_logger("outbox_app.retention")

#: A statement that gets no answer for so many seconds is cut off.
ANSWER_SECONDS = 300.0


class Retention(ProcessLoop):
    """Removes old rows of the outbox on ``using``, of the inbox, and of the logs."""

    resource = "retention"
    #: Seconds between two runs.
    rest = 3600.0

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
            using=using, lease_seconds=self.lease_seconds, resource=self.resource, parts=1
        )
        self.backoff = Backoff("database", logger)
        self._removed = 0
        #: What is left of the run in progress.
        self._work: Iterator[None] | None = None
        self._next = float("-inf")
        #: By kind, why it was not removed the last time.
        self._faults: dict[str, str] = {}
        #: By log, who needs events that are old enough.
        self._holds: dict[str, str] = {}

    @property
    def done(self) -> int:
        return self._removed

    @property
    def trouble(self) -> str:
        faults = [f"{kind}: {fault}" for kind, fault in self._faults.items() if fault]
        holds = [f"{log} is held by {holder}" for log, holder in self._holds.items() if holder]
        return "; ".join(filter(None, [self.backoff.text, *faults, *holds]))

    @property
    def has_failed(self) -> bool:
        return bool(self.backoff.text) or any(self._faults.values())

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
        if not holder.owned:
            self._work = None
        elif self._work is None and time.monotonic() >= self._next:
            self._work = self._prune()
        # It is over, and not gone on with, where a step fails.
        work, self._work = self._work, None
        if work is None:
            return False
        for _ in work:
            self._work = work
            return True
        self._next = time.monotonic() + self.rest
        holder.beat(done=self.done, trouble=self.trouble)
        return False

    def _prune(self) -> Iterator[None]:
        """Remove step by step what there is."""
        for kind, remove in self._kinds():
            self._faults[kind] = ""
            try:
                removed = remove()
            except OutboxError as error:
                self._faults[kind] = described(error)
                logger.error("Not removed kind=%s error=%s", kind, self._faults[kind])
                continue
            self._removed += removed
            if removed:
                logger.info("Removed kind=%s rows=%d", kind, removed)
            yield

    def _kinds(self) -> Iterator[tuple[str, Callable[[], int]]]:
        for kind in ("incidents", "results", "prepared"):
            yield kind, lambda kind=kind: prune(kind, self.using, write=logger.debug)  # type: ignore[misc]
        yield "inbox", lambda: prune("inbox", write=logger.debug)
        if outbox_settings().EVENT_RETENTION_DAYS is not None:
            yield "events", lambda: prune_events(write=logger.debug)

    def _is_finished(self, busy: bool | None, *, once: bool) -> bool:
        return once and busy is False

    def _pause(self) -> float:
        return self.backoff.remaining or self.interval

    def _leave(self) -> None:
        if self.holder.joined:
            self._hand_back(self.holder.leave, self.backoff)


class Sink(Retention):
    """Removes from the logs of SINK on ``using`` what is old, archived, and passed by all."""

    resource = "sink"
    rest = 60.0

    def _prune(self) -> Iterator[None]:
        for log, (archive, days) in sinks(self.using).items():
            table, before = log._meta.db_table, self._removed
            waits_for = fault = ""
            try:
                archived = ArchiveLookup(archive, table)
                for rows, _, held in prune_steps(log, days, BATCH_SIZE, archived, using=self.using):
                    self._removed += rows
                    waits_for = "" if held == TOO_YOUNG else held
                    yield
            except OutboxError as error:
                fault = described(error)
                logger.error("Not sunk log=%s error=%s", table, fault)
            self._faults |= {table: fault}
            self._holds |= {table: waits_for}
            if removed := self._removed - before:
                logger.info("Sunk log=%s rows=%d archive=%s", table, removed, archive)


def retain_here(
    using: str, *, once: bool, listen: Listen, kind: type[Retention] = Retention
) -> int:
    """Run the retention, or the sink, in this thread; ``listen`` is given what stops it."""
    loop = kind(using=using)
    listen(loop.stop)
    logger.info("Retention started kind=%s database=%s", kind.resource, using)
    removed = loop.run(once=once)
    logger.info("Retention stopped kind=%s removed=%d", kind.resource, removed)
    return int(once and loop.has_failed)
