"""The figures of jobs, each once for JSON, text, metrics and overview.

Those of a capability are in its ``doors``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from django.utils.formats import number_format
from django.utils.translation import gettext as _

from ..capability import Figure
from ..jobs.drain.status import DrainerStatus
from ..models import counting
from ..models.counting import shown_count
from ..receipts.status import SentJobs
from ..text import duration, one_line

if TYPE_CHECKING:
    from .status import OutboxStatus

#: How many pairs of queue and task the text lists.
FEW = 5
_READY = ("outbox_app.stagedjob", {"state": "ready"})


# fmt: off
def job_figures(facts: OutboxStatus) -> Iterator[Figure]:
    """Yield the figures of jobs and of drainers."""
    backlog, held, rate, delay = facts.backlog, facts.held, facts.per_minute, facts.delay._asdict()
    dead, jobs = facts.dead, facts.parts is None or "jobs" in facts.parts
    oldest = duration(backlog.oldest_seconds) if facts.waiting else "-"
    age = f", the oldest {oldest} old" if facts.waiting else ""
    yield Figure({"jobs": facts.waiting, "oldest_seconds": round(backlog.oldest_seconds, 3)},
                 json="backlog", lines=[f"ready       {shown_count(facts.waiting)}{age}"])
    yield Figure(backlog.rows, "outbox_backlog_jobs",
                 "Jobs that are ready to leave, counted up to 100001.",
                 title=jobs and _("Ready"), shown=backlog.shown, place=_READY)
    yield Figure(backlog.oldest_seconds, "outbox_oldest_ready_seconds",
                 "For how long the oldest job has been ready.",
                 title=jobs and facts.waiting and _("Oldest ready"), shown=oldest, place=_READY)
    due, soon, later = map(shown_count, (held.due, held.within_the_hour, held.later))
    yield Figure(asdict(held), json="held",
                 lines=[f"held        {due} due now, {soon} within the hour, {later} later"])
    yield Figure({"now": held.due, "hour": held.within_the_hour, "later": held.later},
                 "outbox_held_jobs",
                 "Jobs held until they are due, by when they are due.", ("due",))
    yield from _of_workers(facts.sent)
    at_once = f" ({rate.immediate:.0f} of these immediately)" if rate.immediate else ""
    published = f"{rate.published:.0f} published{at_once}"
    yield Figure(asdict(rate), "outbox_jobs_per_minute",
                 "Jobs of the last full minute, by outcome.", ("outcome",), json="per_minute",
                 lines=[f"per minute  {published}, {rate.dead:.0f} dead in the last full minute"])
    known = {name: duration(n, fine=True) for name, n in delay.items() if n is not None}
    shown = ", ".join(f"{name} {value}" for name, value in known.items())
    yield Figure(delay, "outbox_publish_delay_seconds", "Seconds from staging to the broker's "
                 "confirm, percentiles of the last five minutes.", ("percentile",),
                 json="delay_seconds", lines=[f"delay       {shown}"] if known else (),
                 title=jobs and known and _("Staged to published"), shown=known.get("p95", "-"),
                 note=_("95th percentile of the last 5 minutes"))
    note = _("last minute")
    if facts.immediate:
        note = _("last minute; %(jobs)s immediately") % {"jobs": number(facts.immediate)}
    yield Figure(facts.published, title=_("Published per minute"), shown=number(facts.published),
                 note=note, place=("outbox_app.process", {}))
    by_error = {row.name: row.total for row in dead.errors}
    most = [f"{count} {one_line(name, 80)}" for name, count in by_error.items()]
    more = ", …" if len(most) > 3 or not dead.complete else ""
    listed = f": {', '.join(most[:3])}{more}" if most else ""
    yield Figure({"jobs": dead.total, "complete": dead.complete, "by_error": by_error},
                 json="dead", lines=[f"dead        {shown_count(dead.total)}{listed}"],
                 title=(facts.parts is None or "dead" in facts.parts) and _("Dead"),
                 shown=shown_count(dead.total), place=("outbox_app.deadjob", {}))
    others = dead.total - sum(by_error.values())
    yield Figure({**by_error, "other": others or None}, "outbox_dead_jobs",
                 "Dead jobs by class of the error; other: all but the most frequent.", ("error",))
    kinds = ", ".join(f"{count} {kind}" for kind, count in facts.incidents.items() if count)
    yield Figure(facts.incidents, "outbox_incidents",
                 "Recorded causes of extra publishes in 24 hours.", ("kind",), json="incidents",
                 lines=[f"incidents   {kinds or 'none'} in 24 hours"])
    yield from _of_drainers(facts)


def _of_workers(sent: SentJobs) -> Iterator[Figure]:
    total, shown = sent.total, sent.shown
    listed = list(sent.groups.items())[:counting.LISTED]
    by_task = [{"queue": queue, "task": task, **asdict(each)} for (queue, task), each in listed]
    words = [f"sent        {shown(total.waiting)} waiting for a worker, {shown(total.running)} "
             f"running, {shown(total.again)} sent again, {shown(total.not_started)} not started "
             "within their limit"]
    words += [f"  {one_line(queue or '-', 30)}: {one_line(task, 60)}  {each.waiting} waiting, "
              f"{each.running} running, {each.again} sent again, {each.not_started} not started"
              for (queue, task), each in listed[:FEW]]
    yield Figure({**asdict(total), "complete": sent.complete, "by_task": by_task}, json="sent",
                 lines=words if sent.groups else ())
    yield Figure({(state, *key): getattr(each, state) for key, each in listed
                  for state in ("waiting", "running", "again")},
                 "outbox_sent_jobs", "Sent jobs with a receipt: waiting for a worker, running; and "
                 "those of both that were sent again.", ("state", "queue", "task"))
    queues = sorted(sent.not_started.items(), key=lambda each: -each[1])[:counting.LISTED]
    yield Figure(dict(queues), "outbox_not_started_jobs",
                 "Sent jobs that no worker has started within their limit.", ("queue",))
    yield Figure(total.waiting, title=sent.groups and _("Waiting for a worker"),
                 shown=shown(total.waiting), place=("outbox_app.stagedjob", {"state": "sent"}),
                 note=_("%(running)s running") % {"running": shown(total.running)})


def _of_drainers(facts: OutboxStatus) -> Iterator[Figure]:
    alive, unowned = facts.alive, len(facts.unowned_shards)
    yield Figure(len(alive), "outbox_drainers", "Drainers whose lease has not run out.")
    yield Figure(len(facts.drainers) - len(alive), "outbox_drainers_silent",
                 "Drainers whose lease has run out.")
    yield Figure(sum(bool(each.drainer.trouble) for each in alive), "outbox_drainers_troubled",
                 "Drainers that wait for a broker or a database.")
    yield Figure(unowned, "outbox_shards_unowned",
                 "Shards without a drainer: their jobs do not leave.", json="unowned_shards",
                 lines=[f"drainers    {len(alive)} alive, {unowned} unowned shards"])
    yield Figure([_as_json(facts, each) for each in facts.drainers],
                 json="drainers", lines=[_line(facts, each) for each in facts.drainers])
    labels, by_process = ("host", "pid"), _by_process(facts.drainers).items()
    yield Figure({key: each.shards for key, each in by_process},
                 "outbox_drainer_shards", "Shards that a drainer owns.", labels)
    yield Figure({key: each.silent_seconds for key, each in by_process},
                 "outbox_drainer_heartbeat_age_seconds", "Age of a drainer's heartbeat.", labels)
    yield Figure({key: each.drainer.done for key, each in by_process},
                 "outbox_published_jobs_total", "Jobs that a drainer has published.", labels)
    yield Figure({key: each.drainer.dead for key, each in by_process},
                 "outbox_died_jobs_total", "Jobs that a drainer gave up on.", labels)
# fmt: on


def _as_json(facts: OutboxStatus, each: DrainerStatus) -> dict[str, Any]:
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
        "per_minute": facts.rate(each),
        "trouble": row.trouble,
    }


def _line(facts: OutboxStatus, each: DrainerStatus) -> str:
    trouble = each.drainer.trouble and "  TROUBLE"
    if trouble and each.is_silent:  # else a problem names it
        trouble += f": {one_line(each.drainer.trouble, 200)}"
    return (
        f"  {one_line(each.drainer, 60):<30} {each.shards:>3} shards  "
        f"{facts.rate(each):>6.0f}/min  heartbeat {duration(each.silent_seconds)} ago"
        f"{'  SILENT' if each.is_silent else ''}{trouble}"
    )


def _by_process(drainers: list[DrainerStatus]) -> dict[tuple[str, str], DrainerStatus]:
    """Return the drainers by host and process id.

    A container that was killed restarts with the same host and id while its old row still exists:
    the row with the later heartbeat is returned.
    """
    by_age = sorted(drainers, key=lambda each: each.silent_seconds, reverse=True)
    return {(each.drainer.host, str(each.drainer.pid)): each for each in by_age}


def percentiles(*values: float | None) -> dict[str, float | None]:
    """Return the value of a figure with the label ``percentile``."""
    return dict(zip(("p50", "p95", "p99"), values, strict=False))


def number(value: float | None) -> str:
    """Return a figure for people, ``?`` without a sample."""
    if value is None:
        return "?"
    return number_format(value, 0 if value >= 10 or value == int(value) else 1, force_grouping=True)
