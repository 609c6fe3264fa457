"""The samples of the metrics, from the facts of the status.

They know no client library: ``metrics`` makes families for Prometheus of them. The samples of a
capability come from its section.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..capability import Sample, kinds
from ..jobs.drain.status import DrainerStatus
from .diagnosis import problems
from .status import OutboxStatus


def samples(facts: OutboxStatus) -> Iterator[Sample]:
    """Yield the samples of the core's metrics, and of those of the capabilities."""
    held, rate = facts.held, facts.per_minute
    found = {each.code for each in problems(facts)}
    for code, kind in kinds().items():
        if not code.startswith("max_"):  # metrics know no limits: alerts set them
            yield "outbox_problem", (code, kind.severity), code in found
    yield "outbox_backlog_jobs", (), facts.backlog.rows
    yield "outbox_oldest_ready_seconds", (), facts.backlog.oldest_seconds
    for due, jobs in (("now", held.due), ("hour", held.within_the_hour), ("later", held.later)):
        yield "outbox_held_jobs", (due,), jobs
    for outcome in ("staged", "published", "dead", "immediate"):
        if (value := getattr(rate, outcome)) is not None:
            yield "outbox_jobs_per_minute", (outcome,), value
    yield from percentiles("outbox_publish_delay_seconds", *facts.delay)
    for row in facts.dead.errors:
        yield "outbox_dead_jobs", (row.name,), row.total
    if others := facts.dead.total - sum(row.total for row in facts.dead.errors):
        yield "outbox_dead_jobs", ("other",), others
    for cause, count in facts.incidents.items():
        yield "outbox_incidents", (cause,), count
    yield "outbox_drainers", (), len(facts.alive)
    yield "outbox_drainers_silent", (), len(facts.drainers) - len(facts.alive)
    yield "outbox_drainers_troubled", (), sum(bool(each.drainer.trouble) for each in facts.alive)
    yield "outbox_shards_unowned", (), len(facts.unowned_shards)
    for name, each in _by_process(facts.drainers).items():
        yield "outbox_drainer_shards", name, each.shards
        yield "outbox_drainer_heartbeat_age_seconds", name, each.silent_seconds
        yield "outbox_published_jobs_total", name, each.drainer.done
        yield "outbox_died_jobs_total", name, each.drainer.dead
    for section in facts.sections.values():
        yield from section.samples()


def percentiles(name: str, *values: float | None) -> Iterator[Sample]:
    """Yield samples of a metric with the label ``percentile``; None: no sample."""
    for percentile, value in zip(("50", "95", "99"), values, strict=False):
        if value is not None:
            yield name, (percentile,), value


def _by_process(drainers: list[DrainerStatus]) -> dict[tuple[str, str], DrainerStatus]:
    """Return the drainers by host and process id.

    A container that was killed restarts with the same host and id while its old row still exists:
    the row with the later heartbeat is returned.
    """
    by_age = sorted(drainers, key=lambda each: each.silent_seconds, reverse=True)
    return {(each.drainer.host, str(each.drainer.pid)): each for each in by_age}
