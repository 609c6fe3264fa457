"""The drain: moves committed jobs to the broker, batch by batch, until it is told to stop.

::

    own shards -> select a batch -> publish it -> delete what the broker took -> next

Every step is a statement of its own in autocommit; no transaction is open while the broker is
spoken to. A crash between publish and delete publishes a batch again (recorded as an incident by
whoever takes the shards over); nothing is ever lost. The database or a broker may go away at any
point: the same process rests, and goes on when it is back.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import django.db
from django.db import connections
from django.db.models import Max
from django.utils import timezone

from ...aliases import outbox_alias
from ...conf import outbox_settings
from ...exceptions import LeaseLost, OutboxError, UnsafeBroker
from ...failpoints import failpoint
from ...models import StagedJob
from ...process.backoff import Trouble
from ...process.lease import Membership
from ...process.waiting import Stop, poll_interval, waiter
from ...process.wakeup import LINGER
from ...process.watchdog import Watchdog
from ...signals import drainer_started, drainer_stopped, jobs_published
from ...text import get_logger
from .batch import apps_with_rows
from .debts import Debts
from .drain_counters import DrainCounters
from .lane import Lane, staging_apps
from .outgoing import Outcome
from .records import bury, bury_blocked, record_takeover
from .tracing import trace_batch

logger = get_logger("outbox_app.drain")

#: Seconds for which a drainer that was told to stop goes on with the batch in hand.
FINISH_SECONDS = 5.0


@dataclass(slots=True)
class DrainStats:
    """What a drainer has done."""

    published: int = 0
    dead: int = 0

    @property
    def done(self) -> int:
        """Rows that left the table."""
        return self.published + self.dead


class Stopping(OutboxError):
    """The rest of the batch is left, because the drainer was told to stop."""


class Drain:
    """One drainer.

    Args:
        using: Database alias. Default: the outbox's.
        interval: Seconds between two polls while idle. Default: the setting INTERVAL.
        batch_size: Rows of a batch. Default: the setting BATCH_SIZE.
        max_jobs: Stop after so many jobs (the batch in hand is finished). Default: never.
        lease_seconds: Default: the setting LEASE_SECONDS.
        on_turn: Called after each turn with the drain, for progress.
    """

    def __init__(
        self,
        *,
        using: str | None = None,
        interval: float | None = None,
        batch_size: int | None = None,
        max_jobs: int | None = None,
        lease_seconds: float | None = None,
        on_turn: Callable[[Drain], None] | None = None,
    ) -> None:
        conf = outbox_settings()
        self.using = using or outbox_alias()
        chosen = conf.INTERVAL if interval is None else interval
        self.interval = poll_interval(chosen, using=self.using)
        self.batch_size = batch_size or conf.BATCH_SIZE
        self.max_jobs = max_jobs
        self.on_turn = on_turn
        self.tally = DrainStats()
        self.membership = Membership(
            using=self.using,
            lease_seconds=lease_seconds or conf.LEASE_SECONDS,
            on_takeover=self._record_takeover,
        )
        self._counters = DrainCounters(self.membership, self.tally)
        self._lanes: dict[str, Lane] = {}
        self._debts = Debts(using=self.using)
        self._trouble = Trouble(self)
        #: With ``once``: the last row that was there at the start, and since when nothing was done.
        self._last: int | None = None
        self._idle_since = 0.0
        #: The turn before found nothing.
        self._is_idle = False
        self._stop = Stop()
        self._watchdog = Watchdog(using=self.using, limit=self.membership.lease_seconds)
        self._waiter = waiter(self._stop, using=self.using, watchdog=self._watchdog)

    def __str__(self) -> str:
        return f"{socket.gethostname()}:{os.getpid()} ({self.membership.id})"

    @property
    def trouble(self) -> str:
        """What it is waiting for, in the exceptions' own words; empty when all is well."""
        troubles = [self._trouble, *(lane.trouble for lane in self._lanes.values())]
        return "; ".join(trouble.text for trouble in troubles if trouble.text)

    def open_brokers(self) -> None:
        """Connect to the brokers of the apps of this process. One that is away is no error.

        Raises:
            UnsafeBroker: One is configured to lose messages.
        """
        for app in staging_apps():
            self._lane(app).open()

    def stop(self) -> None:
        """Have it finish the batch in hand and return. From any thread or signal handler."""
        self._stop.set()

    def run(self, *, once: bool = False) -> DrainStats:
        """Drain until ``stop()``; with ``once``, until what is there now has left.

        With ``once`` it leaves to live drainers what is in their shards, and takes over from dead
        ones. A broker that is away is waited for.

        Returns:
            What was done.

        Raises:
            UnsafeBroker: The broker is configured to lose messages.
        """
        drainer_started.send_robust(Drain, using=self.using, drainer=self)
        try:
            with self._watchdog.watching():
                self._loop(once=once)
        finally:
            self._leave()
            drainer_stopped.send_robust(Drain, using=self.using, drainer=self)
        return self.tally

    def _loop(self, *, once: bool) -> None:
        linger = False
        self._last, self._idle_since = None, 0.0
        while not self._stop.is_set():
            busy = self._survive(self._turn_once if once else self.turn)
            if self.on_turn:
                self._quietly(self.on_turn, self)
            if self.max_jobs is not None and self.tally.done >= self.max_jobs:
                break
            if busy is None:
                self._stop.wait(min(self._trouble.rest, self.membership.lease_seconds / 5))
            elif busy:
                linger = True
            elif once and self._survive(self._nothing_left):
                break
            else:
                linger = self._waiter.wait(LINGER if linger else self._pause())

    def turn(self) -> bool:
        """Do one turn. Returns whether there was anything to do."""
        self._beat_if_due()
        # Before shards may be given up: whoever gets them must not find what was published.
        self._pay()
        if self.membership.sharing_is_due():
            self._share_shards()
        self._counters.keep()
        busy = False
        # A poll of an empty table is this one look-up; elsewhere it would be one a shard.
        known = len(self._lanes)
        waiting = self._find_lanes() if self._is_idle else list(self._lanes)
        for lane in list(self._lanes.values()):
            if not lane.trouble.rest and (lane.app in waiting or lane.trouble.text):
                busy |= self._drain(lane)
        if not busy and not self._is_idle:
            self._find_lanes()
        self._is_idle = not busy and len(self._lanes) == known
        return not self._is_idle

    def _beat_if_due(self, *, at_once: bool = False) -> None:
        if not self.membership.joined or not (at_once or self.membership.beat_is_due()):
            return
        tally = self.tally
        self.membership.beat(done=tally.published, dead=tally.dead, trouble=self.trouble)
        self._debts.note_heartbeat()

    def _pay(self) -> None:
        if not self.membership.joined:
            self._debts.record_loss(drainer=str(self))
        self._debts.pay()

    def _share_shards(self) -> None:
        """Share the shards with the other drainers, and look for apps that are new."""
        if self.membership.joined:
            self.membership.rebalance()
        else:
            self.membership.join()
        self._find_lanes()

    def _find_lanes(self) -> list[str]:
        """Return the apps that have rows; each has its lane now."""
        found = apps_with_rows(using=self.using)
        for app in found:
            self._lane(app)
        return found

    def _lane(self, app: str) -> Lane:
        if app not in self._lanes:
            self._lanes[app] = Lane(app, using=self.using, batch_size=self.batch_size)
        return self._lanes[app]

    def _drain(self, lane: Lane) -> bool:
        """Move one batch of a lane."""
        self._counters.reading()
        rows = lane.read(self.membership.owned)
        if self._last is not None:
            rows = [row for row in rows if row.id <= self._last]
        if not rows:
            if lane.trouble.text:  # others may have sent what it failed with
                with self._watchdog.elsewhere():
                    lane.open()
            return False
        failpoint("claimed")
        free = bury_blocked(rows, using=self.using)
        self.tally.dead += len(rows) - len(free)
        if not free:
            return True
        started = time.monotonic()
        with self._watchdog.elsewhere():
            outcome = lane.publish(free, now=self._now(), may_send=self._may_send)
        self._settle(outcome, time.monotonic() - started)
        error = outcome.error
        if isinstance(error, LeaseLost | UnsafeBroker | django.db.Error):
            raise error
        if error is None or isinstance(error, Stopping):
            lane.trouble.over()
            return True
        lane.trouble.note(error)
        return False

    def _settle(self, outcome: Outcome, seconds: float) -> None:
        """Delete what was taken, bury what was refused, and write down what is unknown."""
        self._debts.note_sent(outcome.accepted + outcome.unknown)
        self._debts.delete(outcome.accepted)
        if outcome.unknown:
            detail = repr(outcome.error) if outcome.error else "One of a batch was refused."
            self._debts.record_unknown(outcome.unknown, drainer=str(self), detail=detail)
        self.tally.published += len(outcome.accepted)
        self._counters.accepted(outcome.accepted)
        if outcome.accepted:
            failpoint("published_not_deleted")
        try:
            self._pay()
        finally:
            self._announce(outcome, seconds)
        failpoint("deleted")
        for row, error in outcome.refused:
            self.tally.dead += bury(row, error, using=self.using) is not None

    def _announce(self, outcome: Outcome, seconds: float) -> None:
        if outcome.accepted:
            jobs_published.send_robust(
                Drain,
                using=self.using,
                count=len(outcome.accepted),
                seconds=seconds,
                jobs=outcome.accepted,
            )
        with self._watchdog.elsewhere():
            trace_batch(outcome)

    def _may_send(self, seconds: float = 0.0) -> float:
        """Renew the lease where a send needs it. Returns the seconds that one may take."""
        if self._stop.is_set_for(FINISH_SECONDS):
            raise Stopping("The rest of the batch is left, because the drainer was told to stop.")
        with self._watchdog.busy():
            self._beat_if_due(at_once=not self.membership.holds(seconds))
        left = self.membership.remaining
        if left < outbox_settings().PUBLISH_TIMEOUT:
            raise LeaseLost("The lease is about to end; the batch is left to whoever owns it next.")
        failpoint("checked")
        return left

    def _now(self) -> Any:
        now = self.membership.now()
        return timezone.now() if now is None else _aware(now)

    def _survive(self, step: Callable[..., Any], *args: Any) -> Any:
        """Run a step; return None where the database or the lease failed under it."""
        try:
            with self._watchdog.busy():
                result = step(*args)
        except LeaseLost as error:
            self._trouble.note(error)
        except django.db.Error as error:
            self._trouble.note(error)
            connections[self.using].close()
        else:
            self._trouble.over()
            return result
        return None

    def _pause(self) -> float:
        rests = [lane.trouble.rest for lane in self._lanes.values() if lane.trouble.rest]
        return min(self.interval, self.membership.lease_seconds / 5, *rests)

    def _turn_once(self) -> bool:
        if self._last is None:
            newest = StagedJob.objects.using(self.using).aggregate(id=Max("id"))["id"]
            self._last = newest or 0
        busy = self.turn()
        if busy or not self._idle_since:
            self._idle_since = time.monotonic()
        return busy

    def _nothing_left(self) -> bool:
        """Say whether what was there has left, or belongs to drainers that have proved to live."""
        left = StagedJob.objects.using(self.using).filter(id__lte=self._last)
        if not left.filter(available_at=None).exists() and not left.due().exists():
            return True
        if any(lane.trouble.text for lane in self._lanes.values()):
            return False
        # Our own shards are empty. By this time a dead drainer's are ours.
        return time.monotonic() - self._idle_since > self.membership.lease_seconds * 1.5

    def _record_takeover(self, owner: UUID, shards: list[int]) -> None:
        record_takeover(str(owner), shards, using=self.using, by=str(self))

    def _leave(self) -> None:
        for lane in self._lanes.values():
            lane.close()
        self._waiter.close()
        # With debts the shards are not handed back, but taken over: that is recorded. A connection
        # may have died while it was idle; a database that is away is not waited for.
        for _ in range(1 if self._trouble.text else 2):
            if self._quietly(self._hand_back):
                break

    def _hand_back(self) -> None:
        self._pay()
        if self.membership.joined and self.membership.leave():
            self._debts.note_heartbeat()
        self._pay()
        self._counters.write()

    def _quietly(self, step: Callable[..., None], *args: Any) -> bool:
        try:
            with self._watchdog.busy():
                step(*args)
        except (django.db.Error, LeaseLost) as error:
            logger.warning("Step failed drainer=%s step=%r error=%r", self, step, error)
            connections[self.using].close()
            return False
        return True


def _aware(moment: Any) -> Any:
    return moment if timezone.is_aware(moment) else timezone.make_aware(moment)
