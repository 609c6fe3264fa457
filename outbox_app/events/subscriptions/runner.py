"""Runs subscriptions: takes leases on their partitions, and runs them one after the other.

One process at a time owns a (subscription, partition), by the same leases as the drain; another
process waits, and takes over when the lease has run out. If two processes own one page, the cursor
itself keeps the effects from being committed twice (``subscriptions.cursors``), not the lease. A
process backs off while the database is away. A failure of one subscription stops no other.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import KW_ONLY, dataclass
from datetime import datetime
from typing import Any

from django.db import connections

from ...conf import BEATS, outbox_settings
from ...exceptions import OutboxError
from ...process.backoff import Backoff
from ...process.counters import Counters
from ...process.lease import LeaseHolder
from ...process.loop import ONCE_FAILURES, ProcessLoop
from ...process.wakeup import EVENTS
from ...text import get_logger
from ..conf import event_settings
from ..models import Cursor, Subscription
from ..series import FAILED, HANDLED, LOG, NEWEST_POSITION, SUBSCRIPTION
from .cursors import Paused, SharedPages, StoredRows
from .partition import Partition
from .repartition import adopt_partitions
from .subscriber import Subscriber

logger = get_logger("outbox_app.events.subscriptions")

#: Seconds after which a statement of a handler that gets no answer is cut off.
ANSWER_SECONDS = 300.0


@dataclass(eq=False)
class SubscriptionWorker:
    """The partitions of one subscription that this process owns."""

    subscriber: Subscriber
    _: KW_ONLY
    lease_seconds: float
    batch_size: int | None
    counters: Counters
    is_stopping: Callable[[], bool]

    def __post_init__(self) -> None:
        self.using = self.subscriber.using
        #: Counts failures of the database or of a lease.
        self.backoff = Backoff(f"subscription {self.subscriber.name}", logger)
        self._released_until = float("-inf")
        self.holder = LeaseHolder(
            using=self.using,
            lease_seconds=self.lease_seconds,
            resource=f"subscription:{self.subscriber.name}",
            parts=self.subscriber.partitions,
        )
        self.paused = False
        #: The minute of the last sample.
        self._sampled: datetime | None = None
        self.partitions: dict[int, Partition] = {}
        self._shared = None if self.subscriber.by_time else SharedPages(self.partitions)
        self.handled = 0
        #: Why none of its partitions can be run; empty if they can.
        self.error = ""

    @property
    def trouble(self) -> str:
        return "; ".join(filter(None, [self.backoff.text, self._stopped_by]))

    @property
    def _stopped_by(self) -> str:
        errors = [self.error, *(partition.error for partition in self.partitions.values())]
        return "; ".join(filter(None, errors))

    def beat(self) -> None:
        """Renew the leases, and share the partitions with other processes, when each is due."""
        holder = self.holder
        if holder.joined and holder.beat_is_due():
            holder.beat(done=self.handled, trouble=self.trouble)
        # If making a partition has failed, as without its replica, it is made again.
        is_due = holder.sharing_is_due() or holder.owned != self.partitions.keys()
        if is_due and time.monotonic() >= self._released_until:
            self._share()
            self._sample_if_due()

    def run_once(self) -> bool:
        """Run every partition once. Returns whether there may be more to handle right away."""
        self.beat()
        try:
            return self._run_partitions()
        except Paused:
            self.paused = True  # until the next look at its row
            return False

    def _run_partitions(self) -> bool:
        if self._shared and len(self.partitions) > 1 and not (self.paused or self.error):
            new = {part: each for part, each in self.partitions.items() if each.unprepared}
            rows = StoredRows(self.subscriber, list(new))
            for partition in new.values():
                with self._counting(partition):
                    partition.take_cursors(rows)
            self._shared.begin_turn()
        more = False
        for part, partition in list(self.partitions.items()):
            if self.paused or self.error or self.is_stopping():
                return False
            if self.partitions.get(part) is not partition:
                continue  # the last beat has dropped it
            with self._counting(partition):
                more |= partition.run_once()
            self.beat()  # a handler may take its time
        return more

    def leave(self) -> None:
        """Store the places, and hand the partitions back. ``trouble`` still has their errors."""
        self.error = self._stopped_by
        for partition in self.partitions.values():
            partition.store()
        self._drop(self.partitions)
        if self.holder.joined:
            self.holder.leave()

    @contextmanager
    def _counting(self, partition: Partition) -> Iterator[None]:
        """Count what a partition handles in the block, and its attempts that fail."""
        handled, failed = partition.handled, partition.failed
        try:
            yield
        finally:
            self.handled += partition.handled - handled
            if (minute := self.counters.of(self.holder)) is not None:
                which = {"dimension": SUBSCRIPTION, "label": self.subscriber.name}
                minute.add(HANDLED, partition.handled - handled, **which)
                minute.add(FAILED, partition.failed - failed, **which)

    def _sample_if_due(self) -> None:
        """As the owner of partition 0, note the newest position of each log once a minute."""
        minute = self.counters.of(self.holder)
        if minute is None or minute.begins == self._sampled or 0 not in self.partitions:
            return
        self._sampled = minute.begins
        for table, newest in self.subscriber.newest_positions():
            minute.put(NEWEST_POSITION, newest, dimension=LOG, label=table)

    def _share(self) -> None:
        row, _ = Subscription.objects.using(self.using).get_or_create(
            name=self.subscriber.name, defaults={"partitions": self.subscriber.partitions}
        )
        self.paused = row.paused
        try:
            adopt_partitions(self.subscriber, using=self.using)
            self.error = ""
        except OutboxError as error:
            self._release(str(error))
            return
        # Write only once per process, or old and new code would overwrite each other in turn.
        if not self.holder.joined and row.reads != self.subscriber.reads:
            row.reads = self.subscriber.reads
            row.save(using=self.using, update_fields=["reads"])
        self.holder.share()
        owned = self.holder.owned
        self._drop([part for part in self.partitions if part not in owned])
        self._drop(self._moved_by_hand())
        for part in sorted(owned.difference(self.partitions)):
            self.partitions[part] = Partition(
                self.subscriber,
                part,
                batch_size=self.batch_size or 0,
                shared=self._shared,
                is_stopping=self.is_stopping,
            )

    def _release(self, why: str) -> None:
        """Leave the partitions to processes that can run them, such as those of newer code."""
        if not self.error:
            logger.warning("Leases released subscription=%s reason=%s", self.subscriber.name, why)
        self._released_until = time.monotonic() + self.holder.beat_seconds
        self.leave()
        self.error = why

    def _moved_by_hand(self) -> list[int]:
        """Return the partitions whose cursors a person or a command has moved meanwhile."""
        if not self.partitions:
            return []
        rows = Cursor.objects.using(self.using).filter(subscription=self.subscriber.name)
        found = list(rows.values_list("pk", "partition", "revision", "failures"))
        revisions = {pk: revision for pk, _, revision, _ in found}
        failing = {part for _, part, _, failures in found if failures}
        return [
            part
            for part, partition in self.partitions.items()
            if not partition.revisions.items() <= revisions.items()
            or (partition.resting and part not in failing)
        ]

    def _drop(self, parts: Any) -> None:
        for part in list(parts):
            self.partitions.pop(part).close()


class Runner(ProcessLoop):
    """Runs subscriptions of one database. Settings and subscriptions provide missing options."""

    expected = (Exception,)  # any error of one subscription: the others continue

    def __init__(
        self,
        subscribers: Sequence[Subscriber],
        *,
        interval: float | None = None,
        batch_size: int | None = None,
        lease_seconds: float | None = None,
        on_turn: Callable[[Runner], None] | None = None,
    ) -> None:
        super().__init__(
            using=subscribers[0].using,
            interval=event_settings().SUBSCRIPTION_INTERVAL if interval is None else interval,
            answer_seconds=ANSWER_SECONDS,
            channel=EVENTS,
            on_turn=on_turn,
            logger=logger,
        )
        replicas = {each.read_from for each in subscribers} - {None, self.using}
        self._watchdog.beside = [alias for alias in connections if alias in replicas]
        self.lease_seconds = lease_seconds or outbox_settings().LEASE_SECONDS
        self._counters = Counters(using=self.using)
        self.workers = [
            SubscriptionWorker(
                each,
                lease_seconds=self.lease_seconds,
                batch_size=batch_size,
                counters=self._counters,
                is_stopping=self._stop.is_set,
            )
            for each in subscribers
        ]

    @property
    def done(self) -> int:
        return sum(worker.handled for worker in self.workers)

    @property
    def trouble(self) -> str:
        return "; ".join(f"{w.subscriber.name}: {w.trouble}" for w in self.workers if w.trouble)

    def run_once(self) -> bool:
        """Run every subscription once. Returns whether there may be more to handle right away."""
        more = False
        for worker in self.workers:
            if self._stop.is_set():
                break
            if not worker.backoff.remaining:
                more |= bool(self._run_or_back_off(worker.run_once, worker.backoff))
        self._counters.write_if_due()
        return more

    def _step(self, *, once: bool) -> bool | None:
        more = self.run_once()
        is_away = not more and all(worker.backoff.failures for worker in self.workers)
        return None if is_away else more

    def _is_finished(self, busy: bool | None, *, once: bool) -> bool:
        retries = any(0 < each.backoff.failures < ONCE_FAILURES for each in self.workers)
        return once and not (busy or retries)

    def _pause(self) -> float:
        pauses = [each.pause for w in self.workers for each in w.partitions.values()]
        pauses += [worker.backoff.remaining for worker in self.workers]
        return min([self.interval, self.lease_seconds / BEATS, *filter(None, pauses)])

    def _leave(self) -> None:
        # Stop at the first one that the database does not answer: each further one would time out.
        if all(self._hand_back(worker.leave, worker.backoff) for worker in self.workers):
            self._counters.write()
