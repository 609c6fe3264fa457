"""The facts of an outbox as ``manage.py outbox_status`` writes them for people.

The table begins with what is wrong, and has one line for each thing to know: five seconds have to
be enough. What comes from rows is shown on one line, cut, and without control characters.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..models.counting import shown_count
from ..monitoring.diagnosis import BAD, Problem
from ..monitoring.status import OutboxStatus
from ..text import duration, one_line


def table(status: OutboxStatus, found: list[Problem]) -> Iterator[str]:
    """Yield what a person on call reads: what is wrong first."""
    yield f"Outbox on database {status.database!r}: {verdict(found)}"
    for problem in found:
        yield f"  {'!' if problem.severity == BAD else '-'} {problem.text}"
        if problem.detail:
            yield f"    {problem.detail}"
        yield f"    {problem.action}"
    yield ""
    backlog, held, rate, delay = status.backlog, status.held, status.per_minute, status.delay
    age = f", the oldest {duration(backlog.oldest_seconds)} old" if backlog.rows else ""
    yield f"ready       {backlog.shown}{age}"
    yield (
        f"held        {shown_count(held.due)} due now, {shown_count(held.within_the_hour)} within "
        f"the hour, {shown_count(held.later)} later"
    )
    staged = "?" if rate.staged is None else f"{rate.staged:.0f}"
    yield f"per minute  {staged} staged, {rate.published:.0f} published, {rate.dead:.0f} dead"
    if delay.p50 is not None:
        parts = {"p50": delay.p50, "p95": delay.p95, "p99": delay.p99}
        shown = (f"{name} {duration(value or 0, fine=True)}" for name, value in parts.items())
        yield f"delay       {', '.join(shown)}"
    most = [f"{row.total} {one_line(row.name, 80)}" for row in status.dead.errors]
    more = ", …" if len(most) > 3 or not status.dead.complete else ""
    yield f"dead        {shown_count(status.dead.total)}{': ' if most else ''}" + (
        ", ".join(most[:3]) + more if most else ""
    )
    kinds = [f"{count} {kind}" for kind, count in status.incidents.items() if count]
    yield f"incidents   {', '.join(kinds) or 'none'} in 24 hours"
    yield f"drainers    {len(status.alive)} alive, {len(status.unowned_shards)} unowned shards"
    for each in status.drainers:
        trouble = one_line(each.drainer.trouble, 200)
        yield (
            f"  {one_line(each.drainer, 60):<30} {each.shards:>3} shards  "
            f"{status.rate(each):>6.0f}/min  heartbeat {duration(each.silent_seconds)} ago"
            f"{'  SILENT' if each.is_silent else ''}{'  TROUBLE: ' + trouble if trouble else ''}"
        )
    yield from subscriptions(status)


def verdict(found: list[Problem]) -> str:
    """Return the first line: problems that are bad, else warnings."""
    bad = sum(each.severity == BAD for each in found)
    if bad:
        return "1 PROBLEM" if bad == 1 else f"{bad} PROBLEMS"
    warnings = len(found)
    return "fine" if not found else f"fine, {warnings} warning{'s' if warnings > 1 else ''}"


def subscriptions(status: OutboxStatus) -> Iterator[str]:
    """Yield the lines on subscriptions and gaps, where there are any."""
    if status.subscriptions:
        rate = status.per_minute
        yield f"events      {rate.handled:.0f} handled, {rate.failed:.0f} failed per minute"
    for each in status.subscriptions:
        late = f", the oldest {duration(each.oldest_seconds)} old" if each.behind else ""
        parked = f"  {each.parked} streams parked" if each.parked else ""
        yield f"  {one_line(each.name, 60):<30} {each.state:<8} {each.shown} behind{late}{parked}"
    if status.subscriptions or status.gaps:
        yield f"gaps        {shown_count(status.gaps)} open"
