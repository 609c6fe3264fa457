"""The parts of the overview: what was read, in words and numbers for its template.

At the top whether work is leaving, in one sentence, and what ``monitoring.diagnosis`` has found;
each problem links to the page where it is fixed. Text of strangers is cut, masked and escaped here;
the template escapes it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlencode

from django.contrib.admin.utils import quote
from django.urls import reverse
from django.utils.safestring import SafeString
from django.utils.translation import gettext as _
from django.utils.translation import ngettext

from ..aliases import log_alias
from ..jobs.dead_summary import WINDOWS, DeadGroups, DeadMatrix, DeadRow
from ..jobs.drain import status
from ..models import Event, PreparedEvent, counting
from ..models.statistic import label_of
from ..monitoring import series
from ..monitoring.diagnosis import Problem, Subject
from ..monitoring.sinking import DAY, SinkStatus
from ..monitoring.status import OutboxStatus
from ..prepared.status import PreparedStatus
from ..subscriptions import lag
from ..text import duration, one_line
from .base import escaped_copy
from .charts import Line, chart, number
from .masking import masked_line

#: Tasks and queues that are shown.
FLOWS = 10
#: Without these problems work is leaving.
STOPPED = ("no_drainer", "trouble", "not_leaving")
#: The list where a problem is fixed: a model and a filter; or a table of the overview.
LISTS: dict[str, tuple[str, dict[str, str]] | str] = {
    "not_leaving": ("stagedjob", {"state": "ready"}),
    "late": ("stagedjob", {"state": "ready"}),
    "subscription": ("subscription", {}),
    "paused": ("subscription", {}),
    "parked": ("parkedstream", {}),
    "dead": ("deadjob", {"died": "1h"}),
    "gaps": ("gap", {"state": "open"}),
    "no_check_back": ("preparedevent", {"state": "prepared"}),
    "undecided": ("preparedevent", {"state": "undecided"}),
    "sender_silent": ("preparedevent", {"state": "prepared"}),
    "peer_clock": ("peer", {}),
    "contradiction": ("incident", {"kind": "contradiction"}),
    "sink": "#outbox-sinks",
    "transaction": "#outbox-blocking",
    "snapshot": "#outbox-blocking",
}


@dataclass(frozen=True, slots=True)
class Headline:
    """The sentence, and its tone: ``good``, or the severity of the gravest problem."""

    tone: str
    text: str


def headline(facts: OutboxStatus, found: list[Problem], parts: Collection[str]) -> Headline:
    """Say the worst that there is, or whether work is leaving."""
    if found:
        text = _worst(min(found, key=lambda each: each.code not in STOPPED))
        if more := len(found) - 1:
            words = ngettext("%d other problem.", "%d other problems.", more)
            text = f"{text} {words % more}"
        return Headline(found[0].severity, text)
    if not facts.alive:
        text = _("This project stages nothing, and needs no drainer.")
    elif "jobs" not in parts:
        text = _("Drainers are running.")
    elif not facts.waiting and facts.held.rows:
        text = _("All work that is due has left. Held jobs wait for their time.")
    elif not facts.waiting:
        text = _("All staged work has left. Nothing is waiting.")
    else:
        text = _("Work is leaving. The oldest ready job waits %(age)s.") % {
            "age": duration(facts.backlog.oldest_seconds)
        }
    return Headline("good", text)


def _worst(problem: Problem) -> str:
    if problem.code in STOPPED:
        words = f"{problem.text[:1].lower()}{problem.text[1:]} {problem.action}"
        return _("Work is not leaving: %(problem)s") % {"problem": words}
    if problem.code == "late":
        return _("Work is leaving, late: %(problem)s") % {"problem": problem.text}
    return f"{problem.text} {problem.action}"


def lines(found: list[Problem]) -> list[tuple[Problem, str, list[tuple[str, str, str]]]]:
    """Return each problem with its link, and name, why, and link of each of its subjects."""
    return [(p, _list(p.code), [_subject(p.code, each) for each in p.subjects]) for p in found]


def _subject(code: str, subject: Subject) -> tuple[str, str, str]:
    link = ""
    if code in ("subscription", "paused"):
        link = reverse("admin:outbox_app_subscription_change", args=[quote(subject.key)])
    elif code == "parked":
        link = _list(code, subscription=subject.key)
    elif code == "sender_silent":
        link = _list(code, sender=subject.name)
    return one_line(subject.name, 100), masked_line(subject.why, 300), link


def _list(code: str, **filters: str) -> str:
    place = LISTS.get(code, ("process", {}))
    if isinstance(place, str):
        return place
    model, given = place
    address = reverse(f"admin:outbox_app_{model}_changelist")
    return f"{address}?{urlencode(given | filters)}" if given or filters else address


def figures(
    facts: OutboxStatus, parts: Collection[str]
) -> Iterator[tuple[str, str, str, str, str]]:
    """Yield the figures at the top: name, value, note, and the query of the list behind them."""
    if "jobs" in parts:
        oldest = duration(facts.backlog.oldest_seconds) if facts.waiting else "-"
        yield _("Ready"), facts.backlog.shown, "", "stagedjob", "state=ready"
        yield _("Oldest ready"), oldest, "", "stagedjob", "state=ready"
        yield (
            _("Staged to published"),
            "-" if facts.delay.p95 is None else duration(facts.delay.p95, fine=True),
            _("95th percentile of the last 5 minutes"),
            "",
            "",
        )
    note = _("last minute")
    if at_once := facts.per_minute.immediate:
        note = _("last minute; %(jobs)s immediately") % {"jobs": number(at_once)}
    yield _("Published per minute"), number(facts.published), note, "process", ""
    if "dead" in parts:
        yield _("Dead"), counting.shown_count(facts.dead.total), "", "deadjob", ""
    if "subscriptions" in parts:
        late = max((each.oldest_seconds for each in facts.subscriptions), default=0.0)
        yield _("Subscriptions behind"), duration(late), _("the latest"), "subscription", ""
    if "gaps" in parts:
        yield _("Open gaps"), counting.shown_count(facts.gaps), "", "gap", "state=open"
    if facts.prepared:
        count = counting.shown_count(facts.prepared.undecided)
        yield _("Undecided"), count, "", "preparedevent", "state=undecided"


def flows(using: str) -> list[tuple[str, list[tuple[str, int, str]]]]:
    """Return for tasks and for queues: how many jobs are ready, and how many leave per minute."""
    waiting, leaving = status.ready_by(using=using), series.published_by(using=using)
    found = []
    for dimension, heading in (("task", _("Task")), ("queue", _("Queue"))):
        ready, rates = waiting[dimension], leaving[dimension]
        names = sorted({*ready, *rates}, key=lambda name: (-ready[name], -rates.get(name, 0)))
        rows = [
            (one_line(name, 100) or "-", ready[name], number(rates.get(name, 0.0)))
            for name in names[:FLOWS]
        ]
        found.append((heading, rows))
    return found


def charts(using: str, *, now: int) -> list[SafeString]:
    """Return the backlog, which is ``now`` at this moment, and the rates: by hour and by day."""
    drawn = []
    for name, heading, span, step in (
        ("hour", _("last hour"), 60, 1),
        ("day", _("last day"), 24 * 60, 10),
    ):
        counted = series.series(using=using, minutes=span + step, step=step)
        ready = Line(_("ready"), [*counted.ready[:-1], now], 1)
        title = _("Ready jobs, %(span)s") % {"span": heading}
        drawn.append(chart(f"outbox-backlog-{name}", title, counted.starts, [ready]))
        # The current step is not over: its rates would look like a fall.
        rates = [
            Line(_("staged, estimated"), counted.staged[:-1], 2),
            Line(_("published"), _known(counted, counted.published)[:-1], 1),
            Line(_("dead"), _known(counted, counted.dead)[:-1], 3),
        ]
        title = _("Jobs per minute, %(span)s") % {"span": heading}
        drawn.append(chart(f"outbox-rates-{name}", title, counted.starts[:-1], rates))
    return drawn


def events_chart() -> SafeString:
    using = log_alias(Event)
    handled = series.handled(using=using, minutes=61).values()
    logs = series.published(using=using, minutes=61).values()
    published = _sums(logs)
    # The current minute is not over; of the one before, the next sample may be to come.
    return chart(
        "outbox-events-hour",
        _("Events per minute, last hour"),
        series.starts(using=using, minutes=61)[:-1],
        [
            Line(_("published, estimated"), published[:-1], 2),
            Line(_("handled, by all subscriptions"), _sums(handled)[:-1], 1),
        ],
    )


def _sums(lists: Iterable[list[Any]]) -> list[float | None]:
    """Add series up, minute by minute; None where none of them has a figure."""
    known = [[each for each in figures if each is not None] for figures in zip(*lists, strict=True)]
    return [sum(each) if each else None for each in known] or [None] * 61


def _known(counted: series.Series, values: list[float]) -> list[float | None]:
    """Return None for each step without a sample and a count: no process was there to count."""
    steps = zip(values, counted.ready, counted.published, counted.dead, strict=True)
    return [None if ready is None and not (out or dead) else n for n, ready, out, dead in steps]


def held(jobs: status.Held) -> list[tuple[str, str]]:
    return [
        (_("due now"), counting.shown_count(jobs.due)),
        (_("due within the hour"), counting.shown_count(jobs.within_the_hour)),
        (_("due later"), counting.shown_count(jobs.later)),
    ]


def drainers(facts: OutboxStatus) -> list[dict[str, Any]]:
    return [
        {
            "status": row,
            "drainer": escaped_copy(row.drainer),
            "owned": ranges(row.owned),
            "rate": number(facts.rate(row)),
            "trouble": masked_line(row.drainer.trouble, 200) or "-",
        }
        for row in facts.drainers
    ]


def ranges(shards: list[int]) -> str:
    """Return numbers in ascending order for people: ``0-63, 70``."""
    runs: list[list[int]] = []
    for shard in shards:
        if runs and shard == runs[-1][1] + 1:
            runs[-1][1] = shard
        else:
            runs.append([shard, shard])
    return ", ".join(f"{first}-{last}" if last > first else str(first) for first, last in runs)


def subscriptions(lags: list[lag.SubscriptionLag]) -> list[dict[str, Any]]:
    # The last full minute and the current one.
    handled = series.handled(using=log_alias(Event), minutes=2)
    return [
        {
            "name": one_line(each.name, 80),
            "key": each.name,
            "state": each.state,
            "behind": each.shown,
            "late": duration(each.oldest_seconds) if each.behind else "-",
            "rate": number(handled.get(label_of(each.name), [0.0])[0]),
            "parked": each.parked,
            "gaps": each.gaps,
            "error": masked_line(each.error, 200),
        }
        for each in lags
    ]


def entities(
    facts: OutboxStatus, commands: series.Commands, types: Collection[str]
) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Return rows with their two headings; of entities, those of the types."""
    fine = ["-" if each is None else duration(each, fine=True) for each in commands.commit_seconds]
    sizes = ["-" if each is None else number(each) for each in commands.batch_size]
    figures = [
        (_("Commands per minute"), number(commands.recorded)),
        (_("Conflicts per minute"), number(commands.conflicts)),
        (_("Waiting now"), number(commands.waiting)),
        (_("Commands of a batch, 50 % and 95 % have at most"), ", ".join(sizes)),
        (_("Time of a batch's transaction, 50 % and 95 % take at most"), ", ".join(fine)),
    ]
    rejected = [
        (one_line(code, 100) or "-", number(count)) for code, count in commands.rejected.items()
    ]
    hottest = [
        (one_line(name, 100), number(count))
        for name, count in commands.hottest.items()
        if name.partition(":")[0] in types
    ]
    parts = [
        (_("Figure"), _("Value"), figures),
        (_("Code of rejections"), _("Per minute"), rejected),
        (_("Most commands"), _("Last 5 minutes"), hottest),
    ]
    leading = [(one_line(name, 100), number(count)) for name, count in facts.slices.items()]
    if leading or commands.passed_on or commands.elsewhere:
        figures += [
            (_("Passed on to the server that leads, per minute"), number(commands.passed_on)),
            (_("Executed by another server than that, per minute"), number(commands.elsewhere)),
        ]
        parts.append((_("Server"), _("Leads, of 1024 slices"), leading))
    return parts


def sinks(found: list[SinkStatus]) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Return rows with their two headings, for each log."""
    return [
        (
            one_line(each.log, 100),
            _("Value"),
            [
                (_("Archive"), one_line(each.archive, 200)),
                (_("Events sink after"), duration(each.days * DAY)),
                (_("Oldest in the database"), duration(each.oldest_seconds)),
                (_("Its position"), str(each.position or "-")),
                (_("Behind"), duration(each.behind_seconds) if each.behind_seconds else "-"),
                (_("Waits for"), masked_line(each.waits_for, 200) or "-"),
            ],
        )
        for each in found
    ]


def prepared(
    facts: PreparedStatus, decisions: series.Decisions
) -> list[tuple[str, str, list[tuple[str, str]]]]:
    """Return rows with their two headings."""
    times = (decisions.p50, decisions.p95)
    fine = ["-" if each is None else duration(each, fine=True) for each in times]
    figures = [
        (_("Prepared"), counting.shown_count(facts.prepared)),
        (_("Oldest prepared"), duration(facts.oldest_seconds) if facts.prepared else "-"),
        (_("Undecided"), counting.shown_count(facts.undecided)),
        (_("Processes that ask senders"), str(facts.processes)),
        (_("Time to decide, 50 % and 95 % take at most"), ", ".join(fine)),
        (_("Contradictions in the last day"), counting.shown_count(facts.contradictions)),
    ]
    routes = {"call": _("by a call"), "answer": _("by an answer"), "policy": _("by its policy"),
              "person": _("by a person")}  # fmt: skip
    states = dict(PreparedEvent.State.choices)
    decided = [
        (f"{states.get(outcome, outcome)} {routes.get(route, route)}", number(count))
        for (outcome, route), count in decisions.per_minute.items()
    ]
    silent = [
        (one_line(each.sender, 100), masked_line(each.last_answer, 200)) for each in facts.silent
    ]
    return [
        (_("Figure"), _("Value"), figures),
        (_("Decided"), _("Per minute"), decided),
        (_("Sender that does not answer"), _("Why"), silent),
    ]


def dead(matrix: DeadMatrix) -> dict[str, Any]:
    """Return dead jobs by task and by error, with the query of each cell's list."""
    return {
        "windows": WINDOWS,
        "groups": [
            (_("Task"), [_dead_row(row, "task") for row in matrix.tasks]),
            (_("Error"), [_dead_row(row, "error") for row in matrix.errors]),
        ],
        "complete": matrix.complete,
    }


def _dead_row(row: DeadRow, column: str) -> dict[str, Any]:
    query = urlencode({column: row.name})
    return {
        "name": one_line(row.name, 100),
        "cells": [
            (count, f"{query}&died={window}")
            for window, count in zip(WINDOWS, row.counts, strict=True)
        ],
        "total": row.total,
        "query": query,
        "reason": masked_line(row.reason, 200),
    }


def listed(found: DeadGroups) -> dict[str, Any]:
    """Return dead jobs by task and error for the template ``dead_groups.html``."""
    rows = [
        {
            "count": group.count,
            "task": one_line(group.task, 100),
            "error": one_line(group.error, 100),
            "reason": masked_line(group.reason, 200),
            "newest": group.newest,
        }
        for group in found.groups
    ]
    return {"rows": rows, "complete": found.complete}
