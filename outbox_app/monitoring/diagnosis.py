"""The problems of an outbox, judged once for overview, status command, health and metrics.

This module makes no statements. A problem is ``bad`` if work has stopped or a limit is passed: exit
code 1 and health 503. A ``warning`` needs a person, but not in the night: it is shown everywhere,
with exit code 0 and health 200. Only the project knows how late is too late, and how much is too
much: it sets the limits. A project that stages nothing needs no drainer.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any

from ..aliases import chosen, outbox_alias
from ..capability import BAD, Problem, Subject
from ..jobs.drain.status import DrainerStatus
from ..models.counting import MANY, shown_count
from ..text import duration
from .status import OutboxStatus

#: Age in seconds above which a ready job is late.
LATE = 300.0
#: Seconds after which an open transaction that has written is a problem.
OLD_WRITER = 60.0


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits of a project. None: no limit.

    Raises:
        ValueError: A limit is no number from 0 on, or a limit of jobs is above ``MANY``.
    """

    #: Age of the oldest ready job, in seconds.
    max_age: float | None = None
    #: Jobs that are ready or due.
    max_backlog: int | None = None
    #: Dead jobs.
    max_dead: int | None = None

    def __post_init__(self) -> None:
        for name in self.__slots__:
            limit = getattr(self, name)
            if limit is not None and not 0 <= limit < inf:  # NaN too
                raise ValueError(f"{name} must be a number from 0 on; got {limit}.")
            if limit is not None and name != "max_age" and limit > MANY:
                raise ValueError(f"{name} must be at most {MANY}, where counting stops.")


NO_LIMITS = Limits()


def problems(status: OutboxStatus, limits: Limits = NO_LIMITS) -> list[Problem]:
    """Return what is wrong in ``outbox_status()``, the most urgent first."""
    with chosen(""):  # the alias that commands use by default, not the one that the admin shows
        on = "" if status.database == outbox_alias() else f" --database {status.database}"
    looked_for = [
        *_of_drainers(status, on),
        *_of_lateness(status, limits),
        *_of_dead(status, limits),
        _of_workers(status),
        *_of_transactions(status),
        *(problem for each in status.sections.values() for problem in each.problems(on)),
        problem_of("database", [Subject(alias, why) for alias, why in status.away.items()]),
        problem_of("unmigrated", [Subject(app, run) for app, run in status.unmigrated.items()]),
    ]
    # A count of 0 is a problem only for a kind that has a text for it.
    found = [each for each in looked_for if each.values.get("n") != 0 or each.kind.none]
    return sorted(found, key=lambda each: each.kind.rank)


def is_healthy(found: list[Problem]) -> bool:
    return all(each.severity != BAD for each in found)


def _of_drainers(status: OutboxStatus, on: str) -> Iterator[Problem]:
    alive = status.alive
    silent = [_drainer(each, "silent beyond its lease") for each in status.drainers
              if each.is_silent]  # fmt: skip
    troubled = [_drainer(each, each.drainer.trouble) for each in alive if each.drainer.trouble]
    if not alive:
        if status.stages:
            yield counted("no_drainer", status.waiting, *silent, on=on)
        return
    if status.waiting and len(troubled) == len(alive):
        yield counted("trouble", status.waiting, *troubled)
    else:
        yield counted("unowned_shards", len(status.unowned_shards))
        yield problem_of("drainer_trouble", troubled)
    yield problem_of("drainer_silent", silent)


def _of_lateness(status: OutboxStatus, limits: Limits) -> Iterator[Problem]:
    age, waiting = status.backlog.oldest_seconds, status.waiting
    # If no drainer works, that problem has been reported already.
    if age > LATE and not all(each.drainer.trouble for each in status.alive):
        if not any(map(status.is_publishing, status.alive)):  # immediate delivery does not count
            yield counted("not_leaving", waiting, age=duration(age))
        elif limits.max_age is None:
            yield counted("late", waiting, age=duration(age))
    if limits.max_age is not None and age > limits.max_age:
        yield Problem("max_age", {"age": f"{age:.1f}", "limit": f"{limits.max_age:g}"})
    if limits.max_backlog is not None and waiting > limits.max_backlog:
        yield counted("max_backlog", waiting, limit=limits.max_backlog)


def _of_dead(status: OutboxStatus, limits: Limits) -> Iterator[Problem]:
    if limits.max_dead is None:
        yield counted("dead", status.dead.lately)
    elif status.dead.total > limits.max_dead:
        yield counted("max_dead", status.dead.total, limit=limits.max_dead)


def _of_workers(status: OutboxStatus) -> Problem:
    subjects = [
        Subject(queue or "-", f"{count} not started", filters={"queue": queue})
        for queue, count in status.sent.not_started.items()
    ]
    return counted("not_started", status.sent.total.not_started, *subjects)


def _of_transactions(status: OutboxStatus) -> Iterator[Problem]:
    writers = {
        table: oldest
        for table, found in status.in_flight.items()
        if (oldest := max((each.seconds or 0 for each in found.transactions), default=0))
        > OLD_WRITER
    }
    subjects = [Subject(table, f"open for {duration(age)}") for table, age in writers.items()]
    if writers:
        yield Problem("transaction", {"age": duration(max(writers.values()))}, (*subjects,))
    if status.snapshots.transactions:
        yield Problem("snapshot", {"age": duration(status.snapshots.transactions[0].seconds or 0)})


def problem_of(code: str, subjects: Sequence[Subject]) -> Problem:
    """Return a problem that counts its subjects."""
    return counted(code, len(subjects), *subjects)


def counted(code: str, count: int, *subjects: Subject, **values: Any) -> Problem:
    """Return a problem whose text has a count."""
    return Problem(code, {"n": count, "count": shown_count(count), **values}, subjects)


def _drainer(each: DrainerStatus, why: str) -> Subject:
    return Subject(str(each.drainer), why)
