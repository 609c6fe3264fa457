"""The retention beside other loops: ``Retention`` removes old rows, ``Sink`` archived events.

One process at a time does this, by a lease; two at once would only remove the same rows. Drainers
remove the counters of their databases. ``outbox_prune`` removes fences, which are in the databases
of senders, and events that an archive outside SINK has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import django.db
from django.db import connections

from ..aliases import inbox_alias, log_alias
from ..conf import outbox_settings
from ..eventlog.registry import all_logs, sinks
from ..exceptions import OutboxError
from ..models import EntityVersion, EventLog
from ..pipeline.driver.archive_lookup import ArchiveLookup
from ..process.backoff import described
from ..process.foreground import Listen
from ..process.loop import ONCE_FAILURES, LeasedLoop
from ..text import get_logger
from .events import prune_events, prune_steps
from .rows import BATCH_SIZE, prune

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
        elsewhere = {inbox_alias(), *map(log_alias, all_logs())} - {using}
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
        """Remove old rows, one kind in each step; yield None after each step.

        A kind that cannot be removed is logged, and does not stop the other kinds.
        """
        kinds = ("incidents", "results", "prepared", "inbox")
        removals: dict[str, Callable[..., int]] = {k: partial(prune, k, self.using) for k in kinds}
        if (alias := inbox_alias()) != self.using:
            removals[f"inbox:{alias}"] = partial(prune, "inbox", alias)
        for alias in {*map(log_alias, all_logs())} - {self.using}:  # perhaps without a drainer
            removals[f"counters:{alias}"] = partial(prune, "counters", alias)
        if outbox_settings().ENTITY_COMMAND_DAYS is not None:
            for alias in {log_alias(log) for log in all_logs() if issubclass(log, EntityVersion)}:
                removals[f"commands:{alias}"] = partial(prune, "commands", alias)
        if outbox_settings().EVENT_RETENTION_DAYS is not None:
            removals["events"] = prune_events
        for kind, remove in removals.items():
            self._faults.pop(kind, None)
            try:
                removed = remove(write=logger.debug)
            except (OutboxError, django.db.Error) as error:
                removed, fault = 0, described(error)
                self._faults[kind] = f"{kind}: {fault}"
                logger.error("Not removed kind=%s error=%s", kind, fault)
                if isinstance(error, django.db.Error):
                    self._disconnect()
            self.done += removed
            if removed:
                logger.info("Removed kind=%s rows=%d", kind, removed)
            yield

    def _is_finished(self, busy: bool | None, *, once: bool) -> bool:
        return once and not busy and not 0 < self.backoff.failures < ONCE_FAILURES

    def _pause(self) -> float:
        return self.backoff.remaining or self.holder.beat_seconds


class Sink(Retention):
    """Removes old events from a log of SINK, once archived and passed by all subscriptions.

    A step removes one batch, so the lease is renewed in time however many events there are.
    """

    rest = 60.0

    def __init__(self, log: type[EventLog], **options: Any) -> None:
        self.log = log
        self.resource = f"sink:{log._meta.db_table}"
        super().__init__(using=log_alias(log), **options)

    def _prune(self) -> Iterator[None]:
        table, before = self.log._meta.db_table, self.done
        archive, days = sinks()[self.log]
        known, self._faults = self._faults, {}
        self._held = ""  # prune_steps says nothing about an empty log
        try:
            archived = ArchiveLookup(archive, table)
            for rows, _, held in prune_steps(
                self.log, days, BATCH_SIZE, archived, using=self.using
            ):
                self.done += rows
                self._held = held and f"held by {held}"
                yield
        except OutboxError as error:
            self._faults[table] = described(error)
            if self._faults != known:  # once: the archive may begin an hour later
                logger.error("Not sunk log=%s error=%s", table, self._faults[table])
        if removed := self.done - before:
            logger.info("Sunk log=%s rows=%d archive=%s", table, removed, archive)


def retain_here(make: Callable[[], Retention], *, once: bool, listen: Listen) -> int:
    """Run a retention in this thread; ``listen`` gets the function that stops it."""
    loop = make()
    listen(loop.stop)
    logger.info("Retention started resource=%s database=%s", loop.resource, loop.using)
    removed = loop.run(once=once)
    logger.info("Retention stopped resource=%s removed=%d", loop.resource, removed)
    return int(once and loop.has_failed)
