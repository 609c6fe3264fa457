"""All facts of an outbox at once: for the status command, health view, metrics and overview.

The number of statements depends on the number of Celery apps, subscriptions and logs, not on rows.
Counting stops at ``counting.MANY``, lists are cut, and a figure that was cut says so. The facts are
read one after the other, not at one moment. This module does not judge them: see ``diagnosis``.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Any

import django.db
from django.apps import apps
from django.db.models import Model

from ..aliases import log_alias, outbox_alias
from ..conf import fleet_settings
from ..door.clocks import wrong_clocks
from ..entities.operations import entity_types
from ..eventlog.long_transactions import LongTransactions, long_transactions, open_writers
from ..eventlog.registry import all_logs
from ..fleet.topology import live_servers, slices
from ..jobs.dead_summary import DeadMatrix, dead_matrix
from ..jobs.drain import status
from ..jobs.drain.status import Backlog, DrainerStatus, Held
from ..jobs.staging.declarations import declared
from ..jobs.staging.sending import staging_apps
from ..models import (
    DatabaseNow,
    DeadJob,
    Event,
    Gap,
    Incident,
    Process,
    Server,
    StagedJob,
    counting,
)
from ..prepared.status import PreparedStatus, prepared_status
from ..subscriptions import lag
from ..subscriptions.lag import SubscriptionLag
from . import series
from .series import Commands, Decisions, Delays
from .sinking import SinkStatus, sink_status

#: The most incidents of the last day that are counted.
INCIDENTS = 1000
#: Age in seconds from which a transaction is listed, because it keeps old rows.
OLD_SNAPSHOT = 300.0
#: Parts that can be left out: a page shows a person only the parts that the person may view.
PARTS = frozenset({"jobs", "dead", "subscriptions", "gaps", "entities", "prepared", "servers",
                   "history"})  # fmt: skip


@dataclass(frozen=True, slots=True)
class PerMinute:
    """Jobs and events of the last full minute. None: there is no sample."""

    staged: float | None = None
    published: float = 0.0
    dead: float = 0.0
    #: Jobs published right after their commit.
    immediate: float = 0.0
    handled: float = 0.0
    failed: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxStatus:
    """The facts of an outbox. A part that was left out is empty."""

    database: str
    drainers: list[DrainerStatus]
    #: Jobs published lately, per minute, by the id of the drainer.
    rates: dict[str, float] = field(default_factory=dict)
    #: Whether the project stages jobs: it has an ``OutboxCelery``, a declaration, or a row.
    stages: bool = True
    backlog: Backlog = field(default=Backlog(0, 0.0))
    held: Held = field(default=Held(0, 0, 0))
    #: Seconds from staging to the broker's confirm, of the jobs of the last five minutes.
    delay: Delays = field(default_factory=Delays)
    dead: DeadMatrix = field(default=DeadMatrix([], [], 0, True))
    subscriptions: list[SubscriptionLag] = field(default_factory=list)
    #: Logs whose old events leave the database.
    sinks: list[SinkStatus] = field(default_factory=list)
    #: Open gaps, counted up to MANY + 1.
    gaps: int = 0
    #: Transactions in flight that may have written to a table, by table.
    in_flight: dict[str, LongTransactions] = field(default_factory=dict)
    #: Transactions that have been open for at least OLD_SNAPSHOT.
    snapshots: LongTransactions = field(default=LongTransactions([]))
    #: Incidents of the last 24 hours by kind, the newest INCIDENTS.
    incidents: dict[str, int] = field(default_factory=dict)
    per_minute: PerMinute = PerMinute()
    #: None: the project has no entities.
    commands: Commands | None = None
    #: Servers of the fleet, in the database's registry, whose lease has not run out.
    servers: list[Server] = field(default_factory=list)
    #: None: there are no prepared events.
    prepared: PreparedStatus | None = None
    decisions: Decisions = field(default_factory=Decisions)
    #: Peers whose clocks are wrong by more than a minute, and by how many seconds.
    clocks: dict[str, int] = field(default_factory=dict)
    #: Aliases of logs and entities that cannot be read, and why. What they hold is left out.
    away: dict[str, str] = field(default_factory=dict)

    @property
    def alive(self) -> list[DrainerStatus]:
        """Drainers whose lease has not run out."""
        return [each for each in self.drainers if not each.is_silent]

    @property
    def waiting(self) -> int:
        """Jobs that could leave now, as far as they were counted."""
        return self.backlog.rows + self.held.due

    @property
    def unowned_shards(self) -> list[int]:
        """Shards that no drainer owns. Their jobs do not leave."""
        return status.unowned_shards(self.drainers)

    @property
    def published(self) -> float:
        """Jobs published lately by all drainers, per minute."""
        return sum(self.rates.values())

    @property
    def slices(self) -> dict[str, int]:
        """How many slices of entities each server of this service leads, by its address."""
        return slices(self.servers)

    def rate(self, each: DrainerStatus) -> float:
        """Return what a drainer has published lately, per minute."""
        return self.rates.get(str(each.drainer.pk), 0.0)

    def is_publishing(self, each: DrainerStatus) -> bool:
        """Return whether a drainer has published lately. A new one has not written a rate yet."""
        row, minute = each.drainer, timedelta(minutes=1)
        return bool(self.rate(each) or (row.done and row.heartbeat_at - row.started_at < minute))

    def as_json(self) -> dict[str, Any]:
        """Return the facts for programs. Keys are only added, from release to release."""
        return {
            "database": self.database,
            "backlog": {
                "jobs": self.waiting,
                "oldest_seconds": round(self.backlog.oldest_seconds, 3),
            },
            "held": asdict(self.held),
            "per_minute": asdict(self.per_minute),
            "delay_seconds": self.delay._asdict(),
            "drainers": [self._drainer_as_json(each) for each in self.drainers],
            "unowned_shards": len(self.unowned_shards),
            "dead": {
                "jobs": self.dead.total,
                "complete": self.dead.complete,
                "by_error": {row.name: row.total for row in self.dead.errors},
            },
            "incidents": self.incidents,
            "subscriptions": [each.as_json() for each in self.subscriptions],
            "sinks": [asdict(each) for each in self.sinks],
            "gaps": self.gaps,
            "prepared": self.prepared and self._prepared_as_json(self.prepared),
        }

    def _prepared_as_json(self, facts: PreparedStatus) -> dict[str, Any]:
        decided = self.decisions
        by_route = {" ".join(key): count for key, count in decided.per_minute.items()}
        seconds = {"p50": decided.p50, "p95": decided.p95}
        return asdict(facts) | {"decided_per_minute": by_route, "decide_seconds": seconds}

    def _drainer_as_json(self, each: DrainerStatus) -> dict[str, Any]:
        row = each.drainer
        return {
            "id": str(row.pk),
            "host": row.host,
            "pid": row.pid,
            "shards": each.shards,
            "lease_seconds": row.lease_seconds,
            "silent_seconds": each.silent_seconds,
            "silent": each.is_silent,
            "published": row.done,
            "dead": row.dead,
            "per_minute": self.rate(each),
            "trouble": row.trouble,
        }


def outbox_status(*, using: str | None = None, parts: Collection[str] = PARTS) -> OutboxStatus:
    """Return the facts of an outbox and of the logs beside it.

    Args:
        using: Database alias of both. Default: the outbox's for jobs, and that of ``Event`` for
            subscriptions and gaps.
        parts: Which of ``jobs``, ``dead``, ``subscriptions``, ``gaps``, ``entities``,
            ``prepared``, ``servers`` and ``history`` (incidents and figures per minute) to read
            besides the drainers. Default: all.
    """
    jobs = using or outbox_alias()
    logs = using or log_alias(Event)
    types = entity_types() if "entities" in parts else []
    of_types = {using or log_alias(each.versions) for each in types}
    away = {alias: why for alias in sorted({logs, *of_types} - {jobs}) if (why := _trouble(alias))}
    if logs in away:
        parts, logs = {*parts} - {"subscriptions", "gaps"}, jobs
    facts: dict[str, Any] = {"in_flight": {}, "away": away}
    written: dict[str, list[type[Model]]] = defaultdict(list)
    if "jobs" in parts:
        facts |= {
            "backlog": status.backlog(using=jobs),
            "held": status.held(using=jobs),
            "delay": series.delays(using=jobs),
        }
    if "dead" in parts:
        facts["dead"] = dead_matrix(using=jobs)
    if "subscriptions" in parts:
        facts["subscriptions"] = lag.lags(using=logs)
        facts["sinks"] = sink_status(using=using)
        written[logs] += all_logs(using=logs)
    if "jobs" in parts:
        written[jobs].append(StagedJob)
    for alias, models in written.items():
        facts["in_flight"] |= open_writers(*models, using=alias)
    if "gaps" in parts:
        facts["gaps"] = counting.counted(Gap.objects.using(logs).open())
    if aliases := sorted(of_types - away.keys()):
        facts["commands"] = series.commands(aliases)
    if "prepared" in parts:
        facts["clocks"] = wrong_clocks(using=jobs)
        if prepared := prepared_status(using=jobs):
            facts |= {"prepared": prepared, "decisions": series.decisions(using=jobs)}
    if "servers" in parts and fleet_settings().SERVICE:
        facts["servers"] = live_servers(using=jobs)
    if "history" in parts:
        facts |= {"incidents": _incidents(jobs), "per_minute": _per_minute(jobs, logs)}
    return OutboxStatus(
        database=jobs,
        drainers=status.drainers(using=jobs),
        rates=series.rates(using=jobs),
        stages=_stages(jobs),
        snapshots=long_transactions(using=jobs, seconds=OLD_SNAPSHOT),
        **facts,
    )


def _trouble(using: str) -> str:
    """Return why an alias cannot be read, or has no outbox tables; empty if it can."""
    try:
        Process.objects.using(using).exists()
    except django.db.Error as error:
        return repr(error)
    return ""


def _stages(using: str) -> bool:
    """Return whether the project stages jobs, whichever parts were asked for."""
    return (
        bool(staging_apps())
        or any(declared(each, "create", "update", "delete") for each in apps.get_models())
        or any(model._default_manager.using(using).exists() for model in (StagedJob, DeadJob))
    )


def _incidents(using: str) -> dict[str, int]:
    day = Incident.objects.using(using).filter(created_at__gte=DatabaseNow() - timedelta(days=1))
    kinds = Counter(day.order_by("-created_at").values_list("kind", flat=True)[:INCIDENTS])
    return {kind: kinds[kind] for kind in Incident.Kind.values}


def _per_minute(jobs: str, logs: str) -> PerMinute:
    # The last minute is not over. The one before it is the newest complete minute.
    left = series.series(using=jobs, minutes=5)
    events = left if logs == jobs else series.series(using=logs, minutes=5)
    names = ("staged", "published", "dead", "immediate")
    rates = {name: getattr(left, name)[-2] for name in names}
    return PerMinute(**rates, handled=events.handled[-2], failed=events.failed[-2])
