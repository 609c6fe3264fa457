"""All facts of an outbox at once: what the status command, the health view and the metrics tell.

A number of statements that depends on the number of Celery apps, subscriptions and logs, not on
rows. Counting stops at ``counting.MANY``, lists are cut, and a figure that was cut says so. The
facts are read one after the other, not at one moment. Nothing here judges: see ``problems``.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from datetime import timedelta

from django.db.models import Count, QuerySet

from ..aliases import log_alias, outbox_alias
from ..jobs.drain import status
from ..models import DatabaseNow, DeadJob, Event, Gap, Incident, counting
from ..subscriptions import lag
from ..subscriptions.subscriber import all_subscribers
from . import series as minutes

#: Incidents of the last day that are counted.
INCIDENTS = 1000


@dataclass(frozen=True, slots=True)
class DrainerFacts:
    """One drainer."""

    id: str
    host: str
    pid: int
    shards: int
    lease_seconds: float
    #: Since its last heartbeat.
    silent_seconds: float
    #: Beyond its lease: others may take its shards.
    silent: bool
    #: Since it began.
    published: int
    dead: int
    #: Published, lately.
    per_minute: float
    #: What it waits for, in the exception's own words; empty when all is well.
    trouble: str


@dataclass(frozen=True, slots=True)
class DeadFacts:
    """Dead jobs."""

    jobs: int
    #: False: counting stopped, or there are more errors than are listed.
    complete: bool
    #: By class of the error, the most frequent first.
    by_error: dict[str, int]


@dataclass(frozen=True, slots=True)
class PerMinute:
    """Jobs and events of the last full minute. None: nobody took a sample."""

    staged: float | None
    published: float
    dead: float
    handled: float
    failed: float


@dataclass(frozen=True, slots=True)
class DelayFacts:
    """Seconds from staging to the broker's word, of the jobs of the last minutes."""

    p50: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True, slots=True)
class SubscriptionFacts:
    """One subscription."""

    name: str
    #: One word, as ``manage.py outbox_subscriptions list`` says it.
    state: str
    declared: bool
    #: Whether a process runs it.
    served: bool
    #: Events it is behind, and whether all of them were counted.
    behind: int
    complete: bool
    #: Age of the oldest of them.
    oldest_seconds: float
    #: Whether there are events, and it has never begun with them.
    unread: bool
    handled: int
    parked: int
    gaps: int
    #: Why it stands still.
    error: str


@dataclass(frozen=True, slots=True)
class Facts:
    """What there is to know of an outbox."""

    database: str
    backlog: status.Backlog
    held: status.Held
    drainers: list[DrainerFacts]
    unowned_shards: int
    dead: DeadFacts
    #: Incidents of the last 24 hours by kind, the newest INCIDENTS.
    incidents: dict[str, int]
    per_minute: PerMinute
    delay: DelayFacts
    subscriptions: list[SubscriptionFacts] = field(default_factory=list)
    #: Open gaps, counted up to MANY + 1.
    gaps: int = 0

    @property
    def alive(self) -> list[DrainerFacts]:
        """Drainers whose lease has not run out."""
        return [each for each in self.drainers if not each.silent]

    @property
    def waiting(self) -> int:
        """Jobs that could leave now, as far as they were counted."""
        return self.backlog.rows + self.held.due


def outbox_status(*, using: str | None = None) -> Facts:
    """Return the facts of an outbox and of the logs beside it.

    Args:
        using: Database alias of both. Default: the outbox's for jobs, and that of ``Event`` for
            subscriptions and gaps.
    """
    jobs = using or outbox_alias()
    logs = using or log_alias(Event)
    drainers = status.drainers(using=jobs)
    lags = lag.lags(using=logs)
    delays = minutes.delays(using=jobs)
    return Facts(
        database=jobs,
        backlog=status.backlog(using=jobs),
        held=status.held(using=jobs),
        drainers=_drainers(drainers, using=jobs),
        unowned_shards=len(status.unowned_shards(drainers)),
        dead=dead_facts(DeadJob.objects.using(jobs)),
        incidents=_incidents(jobs),
        per_minute=_per_minute(jobs, logs),
        delay=DelayFacts(p50=delays.p50, p95=delays.p95, p99=delays.p99),
        subscriptions=_subscriptions(lags),
        gaps=counting.counted(Gap.objects.using(logs).filter(state=Gap.State.OPEN)),
    )


def dead_facts(dead: QuerySet[DeadJob]) -> DeadFacts:
    """Return how many of these dead jobs there are, and by error: of the newest MANY."""
    newest, cut = counting.newest(dead)
    found = list(
        newest.order_by()
        .values_list("error")
        .annotate(count=Count("id"))
        .order_by("-count", "error")[: counting.LISTED + 1]
    )
    return DeadFacts(
        jobs=counting.counted(dead),
        complete=not cut and len(found) <= counting.LISTED,
        by_error=dict(found[: counting.LISTED]),
    )


def _drainers(rows: list[status.DrainerStatus], *, using: str) -> list[DrainerFacts]:
    rates = minutes.rates(using=using)
    return [
        DrainerFacts(
            id=str(row.drainer.pk),
            host=row.drainer.host,
            pid=row.drainer.pid,
            shards=row.shards,
            lease_seconds=row.drainer.lease_seconds,
            silent_seconds=row.silent_seconds,
            silent=row.is_silent,
            published=row.drainer.done,
            dead=row.drainer.dead,
            per_minute=rates.get(str(row.drainer.pk), 0.0),
            trouble=row.drainer.trouble,
        )
        for row in rows
    ]


def _incidents(using: str) -> dict[str, int]:
    day = Incident.objects.using(using).filter(created_at__gte=DatabaseNow() - timedelta(days=1))
    kinds = Counter(day.order_by("-created_at").values_list("kind", flat=True)[:INCIDENTS])
    return {kind: kinds[kind] for kind in Incident.Kind.values}


def _per_minute(jobs: str, logs: str) -> PerMinute:
    # The last one is not over; the one before is the newest that is whole.
    left = minutes.series(using=jobs, minutes=5)
    events = left if logs == jobs else minutes.series(using=logs, minutes=5)
    return PerMinute(
        staged=left.staged[-2],
        published=left.published[-2],
        dead=left.dead[-2],
        handled=events.handled[-2],
        failed=events.failed[-2],
    )


def _subscriptions(lags: list[lag.SubscriptionLag]) -> list[SubscriptionFacts]:
    unread = _unread([each.name for each in lags if each.declared and not each.cursors])
    return [
        SubscriptionFacts(
            name=each.name,
            state=each.state,
            declared=each.declared,
            served=each.served,
            behind=each.behind,
            complete=each.complete,
            oldest_seconds=each.oldest_seconds,
            unread=each.name in unread,
            handled=each.handled,
            parked=each.parked,
            gaps=each.gaps,
            error=each.error,
        )
        for each in lags
    ]


def _unread(never_run: list[str]) -> set[str]:
    """Return those of these subscriptions whose logs have any event."""
    declared = [each for each in all_subscribers() if each.name in never_run and not each.fault]
    logs = {log for each in declared for log in each.logs}
    written = {log for log in logs if log._default_manager.using(log_alias(log)).exists()}
    return {each.name for each in declared if written & set(each.logs)}
