"""The facts of an outbox as ``manage.py outbox_status`` writes them: a table for people, and JSON.

The table begins with the verdict, and has one line for each thing to know: five seconds have to be
enough. Whatever comes from rows is shown on one line, cut, and without control characters.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from ..models.counting import shown_count
from ..monitoring.diagnosis import Problem
from ..monitoring.status import Facts
from ..text import one_line


def as_json(facts: Facts, wrong: list[Problem]) -> dict[str, Any]:
    """Return what ``--json`` shows. Keys are only added, from release to release."""
    backlog, held = facts.backlog, facts.held
    values = asdict(facts)
    return {
        "database": facts.database,
        "ok": not wrong,
        "problems": [asdict(each) for each in wrong],
        "backlog": {"jobs": backlog.rows, "oldest_seconds": round(backlog.oldest_seconds, 3)},
        "held": {"due": held.due, "within_the_hour": held.within_the_hour, "later": held.later},
        "per_minute": values["per_minute"],
        "delay_seconds": values["delay"],
        "drainers": values["drainers"],
        "unowned_shards": facts.unowned_shards,
        "dead": values["dead"],
        "incidents": facts.incidents,
        "subscriptions": values["subscriptions"],
        "gaps": facts.gaps,
    }


def table(facts: Facts, wrong: list[Problem]) -> Iterator[str]:
    """Yield what a person on call reads: the verdict first."""
    count = len(wrong)
    verdict = "fine" if not wrong else "1 PROBLEM" if count == 1 else f"{count} PROBLEMS"
    yield f"Outbox on database {facts.database!r}: {verdict}"
    for problem in wrong:
        yield f"  ! {problem.text}"
        if problem.detail:
            yield f"    {problem.detail}"
    yield ""
    backlog, held, rate, delay = facts.backlog, facts.held, facts.per_minute, facts.delay
    age = f", the oldest {seconds(backlog.oldest_seconds)} old" if backlog.rows else ""
    yield f"ready       {backlog.shown}{age}"
    yield (
        f"held        {shown_count(held.due)} due now, {shown_count(held.within_the_hour)} within "
        f"the hour, {shown_count(held.later)} later"
    )
    staged = "?" if rate.staged is None else f"{rate.staged:.0f}"
    yield (f"per minute  {staged} staged, {rate.published:.0f} published, {rate.dead:.0f} dead")
    if delay.p50 is not None:
        parts = {"half": delay.p50, "95 %": delay.p95, "99 %": delay.p99}
        shown = ", ".join(f"{name} {seconds(value or 0)}" for name, value in parts.items())
        yield f"delay       {shown}"
    most = [f"{count} {one_line(error, 80)}" for error, count in facts.dead.by_error.items()]
    more = ", …" if len(most) > 3 or not facts.dead.complete else ""
    yield f"dead        {shown_count(facts.dead.jobs)}{': ' if most else ''}" + (
        ", ".join(most[:3]) + more if most else ""
    )
    kinds = [f"{count} {kind}" for kind, count in facts.incidents.items() if count]
    yield f"incidents   {', '.join(kinds) or 'none'} in 24 hours"
    yield f"drainers    {len(facts.alive)} alive, {facts.unowned_shards} shards without one"
    for each in facts.drainers:
        yield (
            f"  {one_line(f'{each.host}:{each.pid}', 60):<30} {each.shards:>3} shards  "
            f"{each.per_minute:>6.0f}/min  heartbeat {seconds(each.silent_seconds)} ago"
            f"{'  SILENT' if each.silent else ''}"
            f"{'  TROUBLE: ' + one_line(each.trouble, 200) if each.trouble else ''}"
        )
    yield from subscriptions(facts)


def subscriptions(facts: Facts) -> Iterator[str]:
    """Yield the lines on subscriptions and gaps, where there are any."""
    if facts.subscriptions:
        rate = facts.per_minute
        yield f"events      {rate.handled:.0f} handled, {rate.failed:.0f} failed per minute"
    for each in facts.subscriptions:
        late = f", the oldest {seconds(each.oldest_seconds)} old" if each.behind else ""
        parked = f"  {each.parked} streams parked" if each.parked else ""
        yield (
            f"  {one_line(each.name, 60):<30} {each.state:<8} "
            f"{each.behind}{'' if each.complete else '+'} behind{late}{parked}"
        )
    if facts.subscriptions or facts.gaps:
        yield f"gaps        {shown_count(facts.gaps)} open"


def seconds(value: float) -> str:
    """Return a time for people: ``0.4 s``, ``12 min``, ``3.5 h``, ``2.1 days``."""
    if value < 120:
        return f"{value:.1f} s"
    if value < 7200:
        return f"{value / 60:.0f} min"
    return f"{value / 3600:.1f} h" if value < 172800 else f"{value / 86400:.1f} days"
