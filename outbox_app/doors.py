"""The core's own doors: its problems, retention and loops.

The facts of jobs are fields of ``OutboxStatus`` itself, so there is no section; their figures are
in ``monitoring.figures``. The texts of the problems are here, and the rules that find them in
``monitoring.diagnosis``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import datetime
from functools import partial
from typing import Any

from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy

from .aliases import inbox_alias, outbox_alias
from .capability import BAD, WARNING, Doors, Loop, ProblemKind
from .conf import OutboxSettings
from .jobs.drain.run import drain_here
from .models import DeadJob, InboxEntry, Incident, StagedJob, Statistic
from .process.counters import KEPT_DAYS, NAMES, by_name
from .retention.rows import Kept, prune
from .retention.run import Retention, retain_here

# fmt: off
KINDS = {
    "no_drainer": ProblemKind(
        10, BAD, ngettext_lazy(
        "%(count)s job is waiting and no drainer is running.",
        "%(count)s jobs are waiting and no drainer is running.", "n"),
        _("Start manage.py drain_outbox%(on)s."),
        none=_("No drainer is running.")),
    "trouble": ProblemKind(
        20, BAD, ngettext_lazy(
        "%(count)s job is waiting and every drainer is in trouble.",
        "%(count)s jobs are waiting and every drainer is in trouble.", "n"),
        _("Remove the cause; drainers retry on their own."),
        has_cause=True),
    "not_leaving": ProblemKind(
        30, BAD, ngettext_lazy(
        "%(count)s job has been ready for %(age)s.",
        "%(count)s jobs are ready, the oldest for %(age)s.", "n"),
        _("No job was published in the last minute: read the log of the drainers."),
        place=("outbox_app.stagedjob", {"state": "ready"})),
    "unowned_shards": ProblemKind(
        40, BAD, ngettext_lazy(
        "%(count)s shard has no owner: its jobs do not leave until a drainer takes it.",
        "%(count)s shards have no owner: their jobs do not leave until a drainer takes them.", "n"),
        _("Start a drainer if this lasts.")),
    "not_started": ProblemKind(
        45, BAD, ngettext_lazy(
        "No worker has started %(count)s sent job within its limit.",
        "No worker has started %(count)s sent jobs within their limit.", "n"),
        _("A worker of these queues has gone silent, is missing, or has too much to do: see what "
          "they do, and restart those that take nothing."),
        place=("outbox_app.stagedjob", {"state": "not_started"})),
    "database": ProblemKind(
        60, BAD, ngettext_lazy(
        "%(count)s further database cannot be read, or has no outbox tables.",
        "%(count)s further databases cannot be read, or have no outbox tables.", "n"),
        _("The figures lack what it holds: make it available, or migrate it.")),
    "unmigrated": ProblemKind(
        105, WARNING, ngettext_lazy(
        "%(count)s installed app has no tables yet.",
        "%(count)s installed apps have no tables yet.", "n"),
        _("Run manage.py migrate. The figures lack what they hold.")),
    "max_age": ProblemKind(
        80, BAD, _("The oldest ready job is %(age)s s old; the limit is %(limit)s s."),
        _("Start more drainers, or find out what slows them down.")),
    "max_backlog": ProblemKind(
        90, BAD, ngettext_lazy(
        "%(count)s job is ready; the limit is %(limit)s.",
        "%(count)s jobs are ready; the limit is %(limit)s.", "n"),
        _("Start more drainers, or find out what slows them down.")),
    "max_dead": ProblemKind(
        100, BAD, ngettext_lazy(
        "%(count)s dead job; the limit is %(limit)s.",
        "%(count)s dead jobs; the limit is %(limit)s.", "n"),
        _("Remove the cause, then requeue or discard them.")),
    "late": ProblemKind(
        110, WARNING, ngettext_lazy(
        "%(count)s job has been ready for %(age)s.",
        "%(count)s jobs are ready, the oldest for %(age)s.", "n"),
        _("Start more drainers, or find out what slows them down."),
        place=("outbox_app.stagedjob", {"state": "ready"})),
    "drainer_silent": ProblemKind(
        120, WARNING, ngettext_lazy(
        "%(count)s drainer is silent beyond its lease: its jobs wait for another drainer.",
        "%(count)s drainers are silent beyond their lease: their jobs wait for another drainer.",
        "n"),
        _("Start the drainer again, or another one.")),
    "drainer_trouble": ProblemKind(
        130, WARNING, ngettext_lazy(
        "%(count)s drainer is in trouble.", "%(count)s drainers are in trouble.", "n"),
        _("Remove the cause; it continues by itself."),
        has_cause=True),
    "dead": ProblemKind(
        160, WARNING, ngettext_lazy(
        "%(count)s job has died in the last hour.",
        "%(count)s jobs have died in the last hour.", "n"),
        _("Remove the cause, then requeue or discard them."),
        place=("outbox_app.deadjob", {"died": "1h"})),
    "transaction": ProblemKind(
        230, WARNING, _("A transaction that writes has been open for %(age)s."),
        _("What it has written waits for its commit. End the transaction if it hangs."),
        place="#outbox-blocking"),
    "snapshot": ProblemKind(
        240, WARNING,
        _("A transaction has been open for %(age)s: it keeps deleted rows in the tables."),
        _("They slow the batches down: end the transaction."),
        place="#outbox-blocking"),
}
# fmt: on


def _by_name(rows: Any, before: datetime, *, dry_run: bool) -> Iterable[Any]:
    return by_name(rows)


class CoreDoors(Doors):
    """Jobs. Their facts are the fields of ``OutboxStatus`` itself."""

    settings = OutboxSettings
    counters = NAMES

    name = "jobs"
    kinds = KINDS

    def parts(self) -> Mapping[str, Any]:
        return {"jobs": [StagedJob], "dead": [DeadJob]}

    def aliases(self) -> set[str]:
        return {outbox_alias(), inbox_alias()}

    def kept(self) -> Mapping[str, Kept]:
        inbox = (
            "remove old ids of executed jobs (table outbox_inbox). While an id is there, another "
            "delivery of its job does nothing; once it is gone, the job would be executed again"
        )
        counters = (
            "remove old counters (table outbox_statistic). A drainer removes those of its own "
            "database by itself"
        )
        incidents = "remove old recorded causes of extra publishes (table outbox_incident)"
        return {
            "inbox": Kept(InboxEntry, "handled_at", inbox_alias, "INBOX_RETENTION_DAYS", inbox),
            "incidents": Kept(
                Incident, "created_at", outbox_alias, "INCIDENT_RETENTION_DAYS", incidents
            ),
            "counters": Kept(
                *(Statistic, "minute", outbox_alias, KEPT_DAYS, counters), parts=_by_name
            ),
        }

    def removals(self, using: str) -> Mapping[str, Callable[..., int]]:
        found = {kind: partial(prune, kind, using) for kind in ("incidents", "inbox")}
        if (alias := inbox_alias()) != using:
            found[f"inbox:{alias}"] = partial(prune, "inbox", alias)
        return found

    def loops(self, using: str, *, only: str | None) -> Mapping[str, Loop]:
        retention = partial(retain_here, partial(Retention, using=using))
        return {
            "jobs": Loop(partial(drain_here, using)),
            "retention": Loop(retention, cleanup=True),
        }


DOORS = CoreDoors()
