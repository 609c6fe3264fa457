"""How subscriptions are doing: where they stand, how far behind, and which writers are in flight.

The number of statements depends on the number of subscriptions, partitions and logs, not on rows.
Counting stops at ``counting.MANY``, and for each partition at its share of that; a figure that was
cut says so. The age of unhandled events is measured by the database's clock.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from datetime import datetime
from typing import Any

import django.db
from django.db.models import Count, Exists, OuterRef, QuerySet, Subquery
from django.utils.connection import ConnectionDoesNotExist

from ...aliases import model_alias
from ...database.clock import DatabaseNow
from ...models import Lease, Process, counting
from ...monitoring.long_transactions import LongTransactions, open_writers
from ...process.lease import alive
from ...text import error_text
from ..exceptions import DamagedCursor, UnknownLog
from ..log.filter import EventFilter
from ..log.reader import LogReader, reads_by_time
from ..log.registry import all_logs, log_named
from ..log.unread import Unread, count_unread
from ..models import Cursor, EventLog, Gap, ParkedStream, Subscription
from .subscriber import Subscriber, all_subscribers

#: The smallest share of MANY that a partition has.
LEAST = 1000


@dataclass(slots=True)
class CursorLag:
    """One cursor. ``behind`` is None if its state or its log cannot be read."""

    cursor: Cursor
    behind: Unread | None = None
    #: Age of the oldest event that it has not passed, in seconds; 0 if there is none.
    seconds: float = 0.0

    def as_json(self) -> dict[str, Any]:
        """Return the facts for ``--json``, without the traceback of the failing event."""
        cursor, failed = self.cursor, self.cursor.failed_event
        return {
            "log": cursor.log,
            "partition": cursor.partition,
            "position": cursor.position,
            "behind": self.behind and self.behind.rows,
            "seconds_behind": round(self.seconds, 3),
            "error": cursor.error,
            "failed_event": failed
            and {k: v for k, v in failed.items() if k not in ("traceback", "behind")},
        }


@dataclass(slots=True)
class SubscriptionLag:
    """One subscription: what the command, the status, the metrics and the admin show of it."""

    name: str
    #: Primary key of its row; empty if it has never run.
    key: str = ""
    #: One word: paused, failing, running, stopped (no process runs it), waiting (never run),
    #: undeclared (the code of this process does not declare it, and no process runs it).
    state: str = "waiting"
    #: Whether the code of this process declares it.
    declared: bool = False
    #: Whether a process runs it: one whose lease has not run out.
    served: bool = False
    #: Events it is behind, and whether all of them were counted.
    behind: int = 0
    complete: bool = True
    #: Age of the oldest of these events.
    oldest_seconds: float = 0.0
    #: Whether its logs have events, although it has never run.
    unread: bool = False
    handled: int = 0
    parked: int = 0
    #: Open gaps.
    gaps: int = 0
    #: Why it has stopped: the error of the first partition that has one, else the trouble of its
    #: processes, if each of them is in trouble.
    error: str = ""
    #: Why no process can run it as it is declared.
    fault: str = ""
    partitions: int = 1
    #: Its logs, topics and types, as the process that ran it last has declared them.
    reads: dict[str, Any] | None = None
    cursors: list[CursorLag] = field(default_factory=list)

    @property
    def position(self) -> int:
        """The lowest position of its cursors."""
        return min((each.cursor.position for each in self.cursors), default=0)

    @property
    def shown(self) -> str:
        """The count for people: ``1000+`` where counting stopped."""
        return f"{self.behind}{'' if self.complete else '+'}"

    def as_json(self) -> dict[str, Any]:
        """Return the facts, without the cursors. Keys are only added, from release to release."""
        names = [each.name for each in fields(self)]
        left_out = {"key", "fault", "partitions", "reads", "cursors"}
        return {name: getattr(self, name) for name in names if name not in left_out}


def lags(*, using: str, names: list[str] | None = None) -> list[SubscriptionLag]:
    """Return the named subscriptions of an alias, in order; by default all, however many.

    Declared subscriptions that have never run are included.
    """
    # A subscription that cannot run belongs to no alias, so each alias shows it.
    declared = {e.name: e for e in all_subscribers() if e.fault or e.using == using}
    rows = Subscription.objects.using(using).order_by("name")
    found = {row.name: row for row in (rows if names is None else rows.filter(pk__in=names))}
    for name, subscriber in declared.items():
        if names is None or name in names:
            found.setdefault(name, Subscription(name=name, partitions=subscriber.partitions))
    chosen = sorted(found)
    cursors: dict[str, list[CursorLag]] = {name: [] for name in chosen}
    read = Cursor.objects.using(using).filter(subscription__in=chosen)
    for cursor in still_read(read.order_by("subscription", "log", "partition")):
        cursors[cursor.subscription].append(CursorLag(cursor))
    reads = {name: row.reads for name, row in found.items()}
    reads |= {each.name: each.reads for each in declared.values() if not each.fault}
    _measure([each for group in cursors.values() for each in group], declared, reads, using)
    running = served(chosen, using)
    unread = _unread([declared[name] for name in chosen if name in declared and not cursors[name]])
    parked = _counts(ParkedStream.objects.using(using).filter(subscription__in=chosen), cursors)
    gaps = _counts(Gap.objects.using(using).open().filter(subscription__in=chosen), cursors)
    return [
        _lag(
            found[name],
            cursors[name],
            declared=name in declared,
            fault=declared[name].fault if name in declared else "",
            served=name in running,
            error=running.get(name, ""),
            unread=name in unread,
            parked=parked[name],
            gaps=gaps[name],
        )
        for name in chosen
    ]


def still_read(cursors: QuerySet[Cursor]) -> Iterator[Cursor]:
    """Yield the cursors in logs that the subscription reads here, or read when it last ran."""
    declared = {each.name: each.reads["logs"] or () for each in all_subscribers() if not each.fault}
    kept = Subscription.objects.filter(pk=OuterRef("subscription")).values("reads")
    found: Iterable[Any] = cursors.annotate(reads=Subquery(kept))
    for cursor in found:
        ran = cursor.reads
        if not ran or cursor.log in (*ran["logs"], *declared.get(cursor.subscription, ())):
            yield cursor


def _lag(row: Subscription, cursors: list[CursorLag], **facts: Any) -> SubscriptionLag:
    lag = SubscriptionLag(
        name=row.name, partitions=row.partitions, reads=row.reads, cursors=cursors, **facts
    )
    lag.key = "" if row._state.adding else row.name
    lag.behind = sum(each.behind.rows for each in cursors if each.behind)
    lag.complete = all(each.behind and each.behind.complete for each in cursors)
    lag.oldest_seconds = max((each.seconds for each in cursors), default=0.0)
    lag.handled = sum(each.cursor.handled for each in cursors)
    lag.error = lag.fault or next((e.cursor.error for e in cursors if e.cursor.error), lag.error)
    if not (lag.declared or lag.served):
        lag.state = "undeclared"
    elif row.paused:
        lag.state = "paused"
    elif lag.error:
        lag.state = "failing"
    elif cursors:
        lag.state = "running" if lag.served else "stopped"
    return lag


def _unread(never_run: list[Subscriber]) -> set[str]:
    """Return the names of those subscriptions whose logs have any event."""
    logs = {each.name: set(each.logs) for each in never_run if not each.fault}
    every = set().union(*logs.values())
    written = {log for log in every if log._base_manager.using(model_alias(log)).exists()}
    return {name for name, mine in logs.items() if mine & written}


def in_flight(*, using: str) -> dict[str, LongTransactions]:
    """Return for each log of an alias, by table, the transactions in flight that may hold events.

    No reader skips them: their events come when they commit.
    """
    return open_writers(*all_logs(using=using), using=using)


def served(names: list[str], using: str) -> dict[str, str]:
    """Return which of these subscriptions a process runs, and the trouble of those all in it."""
    resources = {f"subscription:{name}": name for name in names}
    found: dict[str, list[str]] = defaultdict(list)
    rows = Process.objects.using(using).filter(resource__in=list(resources))
    leases = Lease.objects.filter(resource=OuterRef("resource"), owner=OuterRef("pk"))
    for row in alive(rows.annotate(owns=Exists(leases))):  # a spare process meets no trouble
        found[resources[row.resource]] += [row.trouble] * bool(row.owns or row.trouble)
    return {name: "; ".join(troubles) * all(troubles) for name, troubles in found.items()}


def _measure(
    lags: list[CursorLag], declared: dict[str, Subscriber], reads: dict[str, Any], using: str
) -> None:
    by_reader: dict[tuple[str, str, bool], list[CursorLag]] = defaultdict(list)
    for each in lags:
        subscriber = declared.get(each.cursor.subscription)
        alias = (subscriber and subscriber.read_from) or using
        key = (each.cursor.log, alias, reads_by_time(each.cursor.state))
        by_reader[key].append(each)
    bound = max(LEAST, counting.MANY // max(1, len(lags)))
    for (table, alias, by_time), group in by_reader.items():
        try:
            log = log_named(table)
        except UnknownLog:  # the project no longer has this log
            continue
        try:
            reader = LogReader(log, using=alias, by_time=by_time)
            readable: list[tuple[CursorLag, tuple[Any, EventFilter]]] = []
            for each in group:
                try:
                    state = reader.load(each.cursor.state)
                except DamagedCursor as error:
                    each.cursor.error = each.cursor.error or str(error)
                    continue
                asked = reads.get(each.cursor.subscription) or {}
                parts, part = each.cursor.partitions, each.cursor.partition
                only = EventFilter(asked.get("topics"), asked.get("types"), parts, part)
                readable.append((each, (state, only)))
            found = count_unread(reader, [pair for _, pair in readable], bound=bound)
            ages = _ages(log, {each.first for each in found if each.first}, alias)
            for (each, _), measured in zip(readable, found, strict=True):
                each.behind = measured
                each.seconds = ages.get(measured.first, 0.0)
        except (django.db.Error, ConnectionDoesNotExist) as error:
            if alias == using:
                raise
            for each in group:  # a replica is unavailable: the other cursors are not affected
                why = f"{alias} cannot be read: {error_text(error)}"
                each.cursor.error = each.cursor.error or why


def _ages(log: type[EventLog], positions: set[int], using: str) -> dict[int, float]:
    if not positions:
        return {}
    rows = log._base_manager.using(using).filter(id__in=positions).annotate(now=DatabaseNow())
    times: list[tuple[int, datetime, datetime]] = list(rows.values_list("id", "recorded_at", "now"))
    return {id: max(0.0, (now - then).total_seconds()) for id, then, now in times}


def _counts(rows: QuerySet[Any], cursors: dict[str, list[CursorLag]]) -> Counter[str]:
    """Count rows by subscription, without rows of logs that the subscription no longer reads."""
    rows, _ = counting.newest(rows)  # enough to say that there are many
    counts: Counter[str] = Counter()
    counted = rows.order_by().values_list("subscription", "log").annotate(count=Count("id"))
    for name, log, count in counted:
        counts[name] += count * any(log == each.cursor.log for each in cursors[name])
    return counts
