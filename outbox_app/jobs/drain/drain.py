"""The drain: moves committed jobs to the broker, batch by batch, until it is stopped.

::

    own shards -> select a batch -> publish it -> delete what the broker took -> next

A row with a receipt is marked instead of deleted, and sent again if no worker starts the job.

Every step is a statement of its own in autocommit; no transaction is open while messages are sent.
After a crash between publish and delete, the drainer that takes the shards over records an incident
and publishes the batch again. The database or a broker may become unavailable at any point: the
same process backs off, and recovers when it is back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from uuid import UUID

import django.db
from django.db.models import Max
from django.utils import timezone

from ...aliases import outbox_alias
from ...capability import all_doors
from ...conf import outbox_settings
from ...database.clock import aware
from ...database.lock_wait import is_conflict
from ...exceptions import BrokerUnavailable, LeaseLost, OutboxError, UnsafeBroker
from ...failpoints import failpoint
from ...models import StagedJob
from ...process import counters
from ...process.backoff import Backoff
from ...process.lease import LeaseHolder
from ...process.loop import ONCE_FAILURES, ProcessLoop, collection_paused
from ...process.wakeup import JOBS
from ...signals import drainer_started, drainer_stopped
from ...text import get_logger
from ..staging.sending import staging_apps
from .app_drain import AppDrain
from .batch import Row, apps_with_rows
from .dead_rows import blocked_by_dead, move_to_dead
from .drain_counters import DrainCounters
from .incidents import record_run_out, record_takeover
from .outcome import PublishResult, announce
from .resending import sort_overdue
from .unsettled import Unsettled

logger = get_logger("outbox_app.drain")

#: For how many seconds after a stop a drainer may go on with the batch that it has begun.
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
    """The drainer stops, and leaves the rest of the batch."""


class Drain(ProcessLoop):
    """One drainer.

    Args:
        using: Database alias. Default: the outbox's.
        interval: Seconds between two polls while idle. Default: the setting INTERVAL.
        batch_size: Rows of a batch. Default: the setting BATCH_SIZE.
        max_jobs: Stop after so many jobs, at the end of a batch. Default: never.
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
        lease_seconds = lease_seconds or conf.LEASE_SECONDS
        super().__init__(
            using=using or outbox_alias(),
            interval=conf.INTERVAL if interval is None else interval,
            answer_seconds=lease_seconds,
            channel=JOBS,
            on_turn=on_turn,
            logger=logger,
        )
        self.batch_size = batch_size or conf.BATCH_SIZE
        self.max_jobs = max_jobs
        self.tally = DrainStats()
        self.holder = LeaseHolder(
            using=self.using, lease_seconds=lease_seconds, on_takeover=self._record_takeover
        )
        self._counters = DrainCounters(self.holder)
        self._chores = [each for doors in all_doors() for each in doors.chores(self.holder)]
        self._apps: dict[str, AppDrain] = {}
        self._unsettled = Unsettled(using=self.using)
        self._backoff = Backoff(self)
        #: With ``once``: the highest id at the start, and when the last one left.
        self._last: int | None = None
        self._idle_since = 0.0
        #: With ``once``: whether jobs were left because their broker did not take them in time.
        self._gave_up = False
        #: Whether the last turn found nothing.
        self._is_idle = False

    def __str__(self) -> str:
        return f"{super().__str__()} ({self.holder.id})"

    @property
    def done(self) -> int:
        return self.tally.done

    @property
    def trouble(self) -> str:
        backoffs = [self._backoff, *(app.backoff for app in self._apps.values())]
        return "; ".join(each.text for each in backoffs if each.text)

    @property
    def has_failed(self) -> bool:
        return self._gave_up or self._backoff.failures >= ONCE_FAILURES

    def open_brokers(self) -> None:
        """Connect to the brokers of this process's apps. An unreachable broker is no error."""
        for app in staging_apps():
            self._app_drain(app.main or "").open()

    def run(self, *, once: bool = False) -> DrainStats:
        """Drain until ``stop()``; with ``once``, until the rows that exist now have left.

        With ``once`` it leaves the shards of live drainers alone, and takes over those of dead
        ones. It gives up if a broker takes nothing for 1.5 times the lease, or if the database has
        failed several times; ``has_failed`` then says so.

        Returns:
            The counts of this drainer.

        Raises:
            UnsafeBroker: The broker is configured to lose messages.
        """
        self._last, self._idle_since, self._gave_up = None, 0.0, False
        drainer_started.send_robust(Drain, using=self.using, drainer=self)
        try:
            super().run(once=once)
        finally:
            drainer_stopped.send_robust(Drain, using=self.using, drainer=self)
        return self.tally

    def _step(self, *, once: bool) -> bool | None:
        step = self._run_up_to_last if once else self.run_once
        return self._run_or_back_off(step, self._backoff)  # type: ignore[no-any-return]

    def _is_finished(self, busy: bool | None, *, once: bool) -> bool:
        if self.max_jobs is not None and self.done >= self.max_jobs:
            return True
        if once and self.has_failed:
            return True
        look = once and busy is False
        return look and bool(self._run_or_back_off(self._nothing_left, self._backoff))

    def run_once(self) -> bool:
        """Do one turn. Returns whether there was anything to do."""
        self._beat_if_due()
        # Before sharing may give shards up: their next owner must not find published rows.
        self._settle_all()
        if self.holder.sharing_is_due():
            joined = self.holder.joined
            self.holder.share()
            # Its counts go on in a new row: they only grow, or a monitor would add them up twice.
            self._beat_if_due(at_once=bool(self.done) and not joined)
            self._find_apps()
        self._counters.keep()
        for chore in self._chores:
            chore()
        busy = False
        # While idle, this one look-up is the whole poll; reading would take one for each shard.
        known = len(self._apps)
        waiting = self._find_apps() if self._is_idle else list(self._apps)
        for app in list(self._apps.values()):
            if not app.backoff.remaining and (app.name in waiting or app.backoff.text):
                with collection_paused():
                    busy |= self._drain(app)
        if not busy and not self._is_idle:
            self._find_apps()
        self._is_idle = not busy and len(self._apps) == known
        return not self._is_idle

    def _beat_if_due(self, *, at_once: bool = False) -> None:
        if not self.holder.joined or not (at_once or self.holder.beat_is_due()):
            return
        self.holder.beat(done=self.tally.published, dead=self.tally.dead, trouble=self.trouble)
        self._unsettled.note_heartbeat()

    def _settle_all(self) -> None:
        if not self.holder.joined:
            self._unsettled.record_loss(drainer=str(self))
        self._unsettled.flush()

    def _find_apps(self) -> list[str]:
        found = apps_with_rows(using=self.using)
        for app in found:
            self._app_drain(app)
        return found

    def _app_drain(self, app: str) -> AppDrain:
        if app not in self._apps:
            self._apps[app] = AppDrain(app, using=self.using, batch_size=self.batch_size)
        return self._apps[app]

    def _drain(self, app: AppDrain) -> bool:
        self._counters.reading()
        rows = app.read(self.holder.owned, but=self._unsettled.locked)
        if self._last is not None:
            rows = [row for row in rows if row.id <= self._last]
        if not rows:
            if app.backoff.text:  # other drainers may have sent the rows that failed
                app.open()
            return False
        failpoint("claimed")
        if run_out := [row for row in rows if row.is_immediate]:
            record_run_out(run_out, using=self.using, by=str(self))
        none_stays = True
        if blocked := blocked_by_dead(rows, using=self.using):
            none_stays = self._bury(blocked)
            gone = {row.id for row, _ in blocked}
            rows = [row for row in rows if row.id not in gone]
        if due := [row for row in rows if row.publishes]:
            try:
                overdue = sort_overdue(
                    due, app, using=self.using, by=str(self), may_send=self._may_send
                )
            except BrokerUnavailable as away:
                app.backoff.failed(away)
                return False
            none_stays &= self._bury(overdue.dead)
            again = {row.id for row in overdue.again}
            rows = [row for row in rows if not row.publishes or row.id in again]
        if not rows:
            return True
        now = aware(self.holder.now() or timezone.now(), using=self.using)
        try:
            result = app.publish(rows, now=now, may_send=self._may_send)
        except BaseException as ended:  # KeyboardInterrupt, say, at any point of the send
            self._unsettled.record_unknown(rows, drainer=str(self), detail=repr(ended))
            raise
        self._settle(app, result)
        error = result.error
        if isinstance(error, LeaseLost | UnsafeBroker | django.db.Error):
            raise error
        app.all_left = none_stays and len(result.accepted) == len(rows)
        if error is None or isinstance(error, Stopping):
            app.backoff.succeeded()
            return True
        app.backoff.failed(error)
        return False

    def _settle(self, app: AppDrain, result: PublishResult) -> None:
        """Settle accepted rows, move refused ones to dead, record unknown ones as incidents."""
        self._unsettled.sent(result.accepted)
        if result.unknown:
            detail = repr(result.error) if result.error else "One of a batch was refused."
            self._unsettled.record_unknown(result.unknown, drainer=str(self), detail=detail)
        self.tally.published += len(result.accepted)
        self._counters.accepted(result.accepted)
        if result.accepted:
            failpoint("published_not_deleted")
        try:
            self._settle_all()
        finally:
            self._announce(app, result)
        failpoint("deleted")
        self._bury(result.refused)

    def _bury(self, refused: Iterable[tuple[Row, Exception]]) -> bool:
        """Move rows to the dead table; return whether none stays.

        As that may take long, renew the lease meanwhile.
        """
        none_stays = True
        for row, error in refused:
            self._beat_if_due()
            try:
                is_moved = move_to_dead(row, error, using=self.using, waits=none_stays)
            except django.db.OperationalError as failure:
                # Another transaction has locked the row: a later batch has it. It is waited for
                # once: that transaction may have cancelled many.
                if not is_conflict(failure):
                    raise
                if not none_stays:
                    return False  # SQLite would wait for each row
                none_stays = False
                continue
            if is_moved:
                self.tally.dead += 1
                self._counters.count(counters.DEAD, 1)
        return none_stays

    def _announce(self, app: AppDrain, result: PublishResult) -> None:
        answers = True

        def keep_alive() -> None:
            nonlocal answers  # after a failure the database is not tried for each receiver
            answers = answers and self._ignore_database_errors(self._beat_if_due)

        announce(result, sender=Drain, using=self.using, keep_alive=keep_alive)
        app.send_events(result, keep_alive)

    def _may_send(self, seconds: float = 0.0) -> float:
        """Renew the lease if a send needs it. Return how many seconds the send may take."""
        if self._stop.is_set_for(FINISH_SECONDS):
            raise Stopping("The rest of the batch is left, because the drainer stops.")
        self._beat_if_due(at_once=seconds > self.holder.remaining)
        left = self.holder.remaining
        if left < outbox_settings().PUBLISH_TIMEOUT:
            raise LeaseLost("The lease is about to end; the batch is left to its next owner.")
        failpoint("checked")
        return left

    def _pause(self) -> float:
        if away := self._backoff.remaining:
            return min(away, self.holder.beat_seconds)
        pauses = [app.backoff.remaining for app in self._apps.values() if app.backoff.remaining]
        return min(self.interval, self.holder.beat_seconds, *pauses)

    def _run_up_to_last(self) -> bool:
        if self._last is None:
            newest = StagedJob.objects.using(self.using).aggregate(id=Max("id"))["id"]
            self._last = newest or 0
        done = self.done
        busy = self.run_once()
        if busy or self.done > done or not self._idle_since:
            self._idle_since = time.monotonic()
        return busy

    def _nothing_left(self) -> bool:
        """Return whether no row is left for this drainer, or it has waited for one long enough."""
        left = StagedJob.objects.using(self.using).filter(id__lte=self._last)
        waiting = [left.filter(available_at=None), left.due()]
        if not any(rows.exists() for rows in waiting):
            return True
        if time.monotonic() - self._idle_since <= self.holder.lease_seconds * 1.5:
            return False
        # By this time we would own the shards of a dead drainer. So the rows that are left belong
        # to live ones, or to apps whose brokers have failed.
        failed = [app.name for app in self._apps.values() if app.backoff.text]
        self._gave_up = any(rows.filter(app__in=failed).exists() for rows in waiting)
        return True

    def _record_takeover(self, owner: UUID, shards: list[int]) -> None:
        name = self.holder.name_of(owner)
        record_takeover(name, set(shards), using=self.using, by=super().__str__())

    def _leave(self) -> None:
        for app in self._apps.values():
            app.close()
        # While something is unsettled the shards are not handed back: another drainer takes them
        # over, and records an incident.
        self._hand_back(self._give_up_shards, self._backoff)

    def _give_up_shards(self) -> None:
        self._settle_all()
        if self.holder.joined and self.holder.leave():
            self._unsettled.note_heartbeat()
        self._settle_all()
        self._counters.write()
