"""All facts of an outbox at once: for the status command, health view, metrics and overview.

The number of statements depends on the number of Celery apps, subscriptions and logs, not on rows.
Counting stops at ``counting.MANY``, lists are cut, and a figure that was cut says so. The facts are
read one after the other, not at one moment. This module does not judge them: see ``diagnosis``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field, fields
from datetime import timedelta
from typing import Any

import django.db
from django.apps import apps
from django.db import OperationalError, ProgrammingError, connections, router, transaction

from ..aliases import chosen_alias, outbox_alias
from ..capability import Doors, Figure, Section, all_doors, capabilities, is_on
from ..database.clock import DatabaseNow
from ..database.tables import Tables
from ..jobs.dead_summary import DeadMatrix, dead_matrix
from ..jobs.drain import status
from ..jobs.drain.status import Backlog, DrainerStatus, Held
from ..jobs.staging.sending import staging_apps
from ..mixin import declared
from ..models import DeadJob, Incident, Process, StagedJob
from ..receipts.status import SentJobs, sent_jobs
from ..text import error_text
from . import series
from .figures import job_figures
from .long_transactions import LongTransactions, long_transactions, open_writers
from .series import Delays

#: The most incidents of the last day that are counted.
INCIDENTS = 1000
#: Age in seconds from which a transaction is listed, because it keeps old rows.
OLD_SNAPSHOT = 300.0


@dataclass(frozen=True, slots=True)
class PerMinute:
    """Jobs of the last full minute."""

    published: float = 0.0
    dead: float = 0.0
    #: Jobs published right after their commit.
    immediate: float = 0.0


@dataclass(frozen=True, slots=True)
class Question:
    """What to read: of which database, and which parts."""

    #: Alias of the outbox.
    database: str
    #: The alias that was asked for, of everything; None: each model's own.
    using: str | None
    #: None: all parts.
    parts: Collection[str] | None
    #: Aliases beside the outbox's that cannot be read, and why.
    away: dict[str, str] = field(default_factory=dict)
    #: Labels of apps whose tables are not there, and what to run.
    unmigrated: dict[str, str] = field(default_factory=dict)
    #: Transactions that may have written to a table that was read, by table.
    in_flight: dict[str, LongTransactions] = field(default_factory=dict)

    def wants(self, part: str) -> bool:
        """Return whether a part was asked for."""
        return self.parts is None or part in self.parts

    def can_read(self, alias: str) -> bool:
        """Return whether an alias can be read, and note why if it cannot."""
        if alias == self.database:
            return True  # else the whole status fails
        if alias not in self.away:
            try:
                Process.objects.using(alias).exists()
            except django.db.Error as error:
                self.away[alias] = error_text(error)
        return alias not in self.away


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxStatus:
    """The facts of an outbox. A part that was left out is empty."""

    database: str
    drainers: list[DrainerStatus]
    #: Which parts were read; None: all.
    parts: Collection[str] | None = None
    #: Jobs published lately, per minute, by the id of the drainer.
    rates: dict[str, float] = field(default_factory=dict)
    #: Whether the project stages jobs: it has an ``OutboxCelery``, a declaration, or a row.
    stages: bool = True
    backlog: Backlog = field(default=Backlog(0, 0.0))
    held: Held = field(default=Held(0, 0, 0))
    #: Jobs with a receipt that were sent, by queue and task.
    sent: SentJobs = field(default_factory=SentJobs)
    #: Seconds from staging to the broker's confirm, of the jobs of the last five minutes.
    delay: Delays = field(default_factory=Delays)
    dead: DeadMatrix = field(default=DeadMatrix([], [], 0, True))
    #: Transactions in flight that may have written to a table, by table.
    in_flight: dict[str, LongTransactions] = field(default_factory=dict)
    #: Transactions that have been open for at least OLD_SNAPSHOT.
    snapshots: LongTransactions = field(default=LongTransactions([]))
    #: Incidents of the last 24 hours by kind, the newest INCIDENTS.
    incidents: dict[str, int] = field(default_factory=dict)
    per_minute: PerMinute = PerMinute()
    #: Jobs published lately right after their commit, per minute. The overview alone sets it.
    immediate: float = 0.0
    #: What the capabilities have read, by their names.
    sections: dict[str, Section] = field(default_factory=dict)
    #: Aliases beside the outbox's that cannot be read, and why. What they hold is left out.
    away: dict[str, str] = field(default_factory=dict)
    #: Labels of installed apps whose tables are not there, and what to run.
    unmigrated: dict[str, str] = field(default_factory=dict)

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

    def rate(self, each: DrainerStatus) -> float:
        """Return what a drainer has published lately, per minute."""
        return self.rates.get(str(each.drainer.pk), 0.0)

    def is_publishing(self, each: DrainerStatus) -> bool:
        """Return whether a drainer has published lately. A new one has not written a rate yet."""
        row, minute = each.drainer, timedelta(minutes=1)
        return bool(self.rate(each) or (row.done and row.heartbeat_at - row.started_at < minute))

    def figures(self) -> Iterator[Figure]:
        """Yield the figures of jobs, then those of the capabilities."""
        yield from job_figures(self)
        for section in self.sections.values():
            yield from section.figures()

    def as_json(self) -> dict[str, Any]:
        """Return the facts for programs. Keys are only added, from release to release."""
        figures = {each.json: each.value for each in self.figures() if each.json}
        return {"database": self.database, **figures}


def outbox_status(
    *, using: str | None = None, parts: Collection[str] | None = None
) -> OutboxStatus:
    """Return the facts of an outbox, and those of the capabilities beside it.

    Args:
        using: Database alias of everything. Default: the outbox's for jobs, and for each capability
            the alias of its own models.
        parts: Which of ``jobs``, ``dead``, ``history`` (incidents and figures per minute) and the
            parts of capabilities (``Doors.parts``) to read besides the drainers. Default: all.
    """
    jobs = using or outbox_alias()
    question = Question(jobs, using, parts)
    facts: dict[str, Any] = {}
    if question.wants("jobs"):
        facts |= {
            "backlog": status.backlog(using=jobs),
            "held": status.held(using=jobs),
            "sent": sent_jobs(using=jobs),
            "delay": series.delays(using=jobs),
        }
        question.in_flight.update(open_writers(StagedJob, using=jobs))
    if question.wants("dead"):
        facts["dead"] = dead_matrix(using=jobs)
    read = ((doors.name, _section(doors, question)) for doors in all_doors())
    sections = {name: section for name, section in read if section}
    if question.wants("history"):
        facts |= {"incidents": _incidents(jobs), "per_minute": _per_minute(jobs)}
    return OutboxStatus(
        database=jobs,
        drainers=status.drainers(using=jobs),
        parts=parts,
        rates=series.rates(using=jobs),
        stages=_stages(jobs),
        snapshots=long_transactions(using=jobs, seconds=OLD_SNAPSHOT),
        sections=sections,
        in_flight=question.in_flight,
        away=question.away,
        unmigrated=question.unmigrated,
        **facts,
    )


def _section(doors: Doors, question: Question) -> Section | None:
    """Return what an app has read. An app whose tables are not there yet hides no other facts."""
    using = question.using or question.database
    whole = connections[using].in_atomic_block  # of a request: PostgreSQL refuses what follows
    try:
        with transaction.atomic(using=using) if whole else nullcontext():
            return doors.read(question)
    except (OperationalError, ProgrammingError):
        [app] = [each for each in capabilities() if each.doors is doors]
        for model in app.get_models():
            alias = question.using or chosen_alias() or router.db_for_write(model)
            tables = Tables(connections[alias])
            if is_on(alias, model) and model._meta.db_table not in tables:
                run = f"Run: manage.py migrate {app.label} --database {alias}"
                question.unmigrated[app.label] = run
                return None
        raise


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


def _per_minute(using: str) -> PerMinute:
    # The last minute is not over. The one before it is the newest complete minute.
    left = series.series(using=using, minutes=5)
    return PerMinute(*(getattr(left, each.name)[-2] for each in fields(PerMinute)))
