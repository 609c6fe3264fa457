"""What is wrong, judged from the facts: work that does not leave, and limits that are passed.

No statement of its own. Without limits there is a problem only where work waits and nobody moves
it: that is never right. How late is too late, and how much too much, only the project knows.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

from ..models.counting import MANY, shown_count
from ..text import one_line
from .status import DrainerFacts, Facts, SubscriptionFacts


@dataclass(frozen=True, slots=True)
class Limits:
    """What is still fine. None: no limit.

    Raises:
        ValueError: A limit is no number from 0 on, or a number of jobs is more than is counted.
    """

    #: Age of the oldest ready job, in seconds.
    max_age: float | None = None
    #: Jobs that are ready.
    max_backlog: int | None = None
    #: Dead jobs.
    max_dead: int | None = None

    def __post_init__(self) -> None:
        """Refuse what could never be passed."""
        for name in self.__slots__:
            limit = getattr(self, name)
            if limit is not None and not 0 <= limit < inf:  # NaN too
                raise ValueError(f"{name} must be a number from 0 on; got {limit}.")
            if limit is not None and name != "max_age" and limit > MANY:
                raise ValueError(f"{name} must be at most {MANY}, where counting stops.")


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that needs a person."""

    #: A word for programs.
    code: str
    #: A sentence for anybody: it holds numbers only.
    text: str
    #: Names and the exceptions' own words, for those who operate the project.
    detail: str = ""


def problems(facts: Facts, limits: Limits) -> list[Problem]:
    """Return what is wrong, the gravest first."""
    return [*_nothing_leaves(facts), *_stand_still(facts), *_beyond(facts, limits)]


def _nothing_leaves(facts: Facts) -> list[Problem]:
    if not facts.waiting:
        return []
    wait = f"{shown_count(facts.waiting)} {'job waits' if facts.waiting == 1 else 'jobs wait'}"
    alive = facts.alive
    if not alive:
        silent = [_name(each) for each in facts.drainers]
        detail = f"Silent beyond their lease: {', '.join(silent)}." if silent else ""
        return [Problem("no_drainer", f"{wait}, and no drainer is running.", detail)]
    troubled = [each for each in alive if each.trouble]
    if len(troubled) == len(alive):
        detail = "; ".join(f"{_name(each)}: {one_line(each.trouble, 200)}" for each in troubled[:3])
        return [Problem("trouble", f"{wait}, and every drainer is in trouble.", detail)]
    return []


def _stand_still(facts: Facts) -> list[Problem]:
    found = [(each.name, _why(each)) for each in facts.subscriptions if _why(each)]
    if not found:
        return []
    text = (
        "1 subscription stands still."
        if len(found) == 1
        else f"{len(found)} subscriptions stand still."
    )
    detail = "; ".join(f"{one_line(name, 80)}: {one_line(why, 200)}" for name, why in found)
    return [Problem("subscription", text, detail)]


def _why(each: SubscriptionFacts) -> str:
    """Return why a subscription stands still, or nothing: it moves, or is not meant to."""
    if each.state == "failing":
        return each.error
    if not each.declared or each.state == "paused" or each.served:
        return ""
    if each.state == "waiting":
        return "it has never run, and there are events" if each.unread else ""
    return "no process runs it, and it is behind" if each.behind or not each.complete else ""


def _beyond(facts: Facts, limits: Limits) -> list[Problem]:
    found = []
    age, rows, dead = facts.backlog.oldest_seconds, facts.backlog.rows, facts.dead.jobs
    if limits.max_age is not None and age > limits.max_age:
        text = f"The oldest ready job is {age:.1f} s old; the limit is {limits.max_age:g} s."
        found.append(Problem("max_age", text))
    if limits.max_backlog is not None and rows > limits.max_backlog:
        text = f"{shown_count(rows)} jobs are ready; the limit is {limits.max_backlog}."
        found.append(Problem("max_backlog", text))
    if limits.max_dead is not None and dead > limits.max_dead:
        text = f"{shown_count(dead)} dead jobs; the limit is {limits.max_dead}."
        found.append(Problem("max_dead", text))
    return found


def _name(drainer: DrainerFacts) -> str:
    return one_line(f"{drainer.host}:{drainer.pid}", 100)
