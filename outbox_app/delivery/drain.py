"""The drain: moves committed jobs to the broker, batch by batch, until it is told to stop.

::

    own shards -> select a batch -> publish it -> delete what the broker took -> next

Every step is a statement of its own in autocommit; no transaction is open while the broker is
spoken to. A crash between publish and delete publishes a batch again (recorded as an incident by
whoever takes the shards over); nothing is ever lost. The
database or the broker may go away at any point: the same process backs off and goes on when they
    are back.
"""

from __future__ import annotations

import logging
import random
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import django.db
from django.db import connections
from django.db.models import Max, Min

from ..conf import settings
from ..exceptions import BrokerUnavailable, LeaseLost, OutboxError
from ..intake.rows import outbox_alias
from ..intake.sending import celery_app
from ..intake.wake import LINGER
from ..models import Incident, StagedJob
from ..signals import drainer_started, drainer_stopped, jobs_expired, jobs_published
from .batch import BatchReader, Row, delete
from .failpoints import failpoint
from .lease import Membership
from .publisher import Outcome, Publisher
from .records import bury, bury_blocked, record_incident
from .waiting import waiter
from .watchdog import Watchdog

logger = logging.getLogger("outbox_app.drain")


@dataclass(slots=True)
class Tally:
    """What a drainer has done."""

    published: int = 0
    expired: int = 0
    dead: int = 0

    @property
    def done(self) -> int:
        """Rows that left the table."""
        return self.published + self.expired + self.dead


class UnknownApp(OutboxError, LookupError):
    """The row names a Celery app that is not loaded in the drainer's process."""


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
        conf = settings()
        self.using = using or outbox_alias()
        self.interval = conf.INTERVAL if interval is None else interval
        self.max_jobs = max_jobs
        self.on_turn = on_turn
        self.tally = Tally()
        self.trouble = ""
        self.membership = Membership(
            using=self.using, lease_seconds=lease_seconds or conf.LEASE_SECONDS
        )
        self.reader = BatchReader(using=self.using, batch_size=batch_size or conf.BATCH_SIZE)
        self._publishers: dict[str, Publisher] = {}
        self._undeleted: list[int] = []
        self._failures = 0
        self._stop = threading.Event()
        self._waiter = waiter(self._stop, using=self.using)
        self._watchdog = Watchdog(using=self.using, limit=self.membership.lease_seconds)

    def __str__(self) -> str:
        return f"{socket.gethostname()}:{self.membership.id}"

    def stop(self) -> None:
        """Ask the drain to finish the batch in hand and return. From any thread."""
        self._stop.set()

    def run(self, *, once: bool = False) -> Tally:
        """Drain until ``stop()``; with ``once``, until nothing is left that it could take.

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
        started = time.monotonic()
        while not self._stop.is_set():
            busy = self._survive(self.turn)
            if self.on_turn:
                self._quietly(self.on_turn, self)
            if self.max_jobs is not None and self.tally.done >= self.max_jobs:
                break
            if busy is None:
                self._back_off()
            elif busy:
                linger = True
            elif once and self._survive(self._nothing_left, started):
                break
            else:
                linger = self._waiter.wait(LINGER if linger else self._pause())

    def turn(self) -> bool:
        """Do one turn. Returns whether there was anything to do."""
        self._keep_lease()
        self._delete()
        rows = self.reader.read(self.membership.owned)
        if not rows:
            return False
        failpoint("claimed")
        rows = bury_blocked(rows, using=self.using)
        error: Exception | None = None
        for name in dict.fromkeys(row.app for row in rows):
            try:
                self._publish(name, [row for row in rows if row.app == name])
            except BrokerUnavailable as unavailable:
                error = unavailable  # another app's broker may be well
        if error is not None:
            raise error
        return True

    def _keep_lease(self) -> None:
        """Beat, share the shards with the others, and write down what was taken over."""
        membership = self.membership
        if not membership.joined:
            membership.join()
        elif membership.beat_is_due():
            self._beat()
            membership.rebalance()
        for owner, shards in membership.taken_over().items():
            self._record_takeover(str(owner), shards)

    def _publish(self, name: str, rows: list[Row]) -> None:
        """Publish rows of one app, and settle each of them."""
        app = celery_app(name)
        if app is None:
            error = UnknownApp(
                f"No Celery app named {name!r} is loaded in the drainer's process. "
                "Import its module in the project's __init__.py, then requeue the job."
            )
            self._settle(Outcome(refused=[(row, error) for row in rows]), 0.0)
            return
        publisher = self._publishers.get(name)
        if publisher is None:
            publisher = Publisher(app, timeout=settings().PUBLISH_TIMEOUT)
            self._publishers[name] = publisher
        started = time.monotonic()
        outcome = publisher.publish(rows, still_owner=self._still_owner)
        self._settle(outcome, time.monotonic() - started)
        if outcome.error is not None:
            raise (
                outcome.error
                if isinstance(outcome.error, OutboxError)
                else BrokerUnavailable(
                    f"The broker of Celery app {name!r} failed: {outcome.error!r}"
                )
            )

    def _settle(self, outcome: Outcome, seconds: float) -> None:
        """Delete what was taken, bury what was refused, and write down what is unknown."""
        self._undeleted += [row.id for row in outcome.accepted + outcome.expired]
        self.tally.published += len(outcome.accepted)
        self.tally.expired += len(outcome.expired)
        if outcome.accepted:
            failpoint("published_not_deleted")
        self._delete()
        failpoint("deleted")
        if outcome.unknown:
            self._record_unknown(outcome)
        for row, error in outcome.refused:
            self.tally.dead += bury(row, error, using=self.using) is not None
        if outcome.accepted:
            jobs_published.send_robust(
                Drain,
                using=self.using,
                count=len(outcome.accepted),
                seconds=seconds,
                jobs=outcome.accepted,
            )
        if outcome.expired:
            jobs_expired.send_robust(Drain, using=self.using, jobs=outcome.expired)

    def _delete(self) -> None:
        # Kept until it succeeds: rows that were published must not be read again.
        delete(self._undeleted, using=self.using)
        self._undeleted = []

    def _still_owner(self) -> None:
        membership = self.membership
        self._watchdog.touch()
        if membership.beat_is_due():
            self._beat()
        if not membership.holds(settings().PUBLISH_TIMEOUT):
            raise LeaseLost("The lease is about to end; the batch is left to whoever owns it next.")

    def _beat(self) -> None:
        tally = self.tally
        self.membership.beat(
            published=tally.published, expired=tally.expired, dead=tally.dead, trouble=self.trouble
        )

    def _survive(self, step: Callable[..., Any], *args: Any) -> Any:
        """Run a step; return None where the database, the broker or the lease failed under it."""
        try:
            with self._watchdog.busy():
                result = step(*args)
        except LeaseLost as error:
            self._in_trouble(error)
            self.membership.joined = False
        except BrokerUnavailable as error:
            self._in_trouble(error)
        except django.db.Error as error:
            self._in_trouble(error)
            connections[self.using].close()
        else:
            if self._failures:
                logger.warning(
                    "Drainer goes on again drainer=%s after_failures=%d", self, self._failures
                )
            self._failures, self.trouble = 0, ""
            return result
        return None

    def _in_trouble(self, error: Exception) -> None:
        if not self._failures:
            logger.warning("Drainer is in trouble drainer=%s error=%r", self, error)
        self._failures += 1
        self.trouble = f"{type(error).__name__}: {error}".replace("\x00", "\\x00")

    def _back_off(self) -> None:
        longest = min(settings().MAX_BACKOFF, 0.1 * 2 ** min(self._failures, 16))
        until = time.monotonic() + longest * random.uniform(0.5, 1)
        while not self._stop.is_set() and time.monotonic() < until:
            self._stop.wait(min(self._pause(), until - time.monotonic()))
            if self.membership.joined and self.membership.beat_is_due():
                self._quietly(self._beat)

    def _pause(self) -> float:
        return min(self.interval, self.membership.lease_seconds / 5)

    def _nothing_left(self, started: float) -> bool:
        """Say whether what is left belongs to live drainers: a dead one's lease is over."""
        ready = StagedJob.objects.using(self.using).filter(available_at=None)
        if not ready.exists():
            return not StagedJob.objects.using(self.using).due().exists()
        if self.reader.read(self.membership.owned):
            return False
        return time.monotonic() - started > self.membership.lease_seconds * 1.5

    def _record_takeover(self, owner: str, shards: list[int]) -> None:
        ids = StagedJob.objects.using(self.using).aggregate(first=Min("id"), last=Max("id"))
        if ids["first"] is not None:
            record_incident(
                Incident.Kind.TAKEOVER,
                using=self.using,
                shards=shards,
                first_id=ids["first"],
                last_id=ids["last"],
                drainer=owner,
                detail=f"Taken over by {self} after the lease of drainer {owner} had run out.",
            )

    def _record_unknown(self, outcome: Outcome) -> None:
        ids = [row.id for row in outcome.unknown]
        record_incident(
            Incident.Kind.UNKNOWN,
            using=self.using,
            shards=sorted({row.shard for row in outcome.unknown}),
            first_id=min(ids),
            last_id=max(ids),
            drainer=str(self),
            detail=repr(outcome.error) if outcome.error else "One of a batch was refused.",
        )

    def _leave(self) -> None:
        for publisher in self._publishers.values():
            publisher.close()
        self._waiter.close()
        self._quietly(self._delete)
        if self.membership.joined:
            self._quietly(self.membership.leave)

    def _quietly(self, step: Callable[..., None], *args: Any) -> None:
        try:
            with self._watchdog.busy():
                step(*args)
        except (django.db.Error, LeaseLost) as error:
            logger.warning("Step failed drainer=%s step=%r error=%r", self, step, error)
            connections[self.using].close()
