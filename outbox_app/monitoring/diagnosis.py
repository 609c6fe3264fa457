"""The problems of an outbox, judged once for overview, status command, health and metrics.

This module makes no statements. A problem is ``bad`` if work has stopped or a limit is passed: exit
code 1 and health 503. A ``warning`` needs a person, but not in the night: it is shown everywhere,
with exit code 0 and health 200. Only the project knows how late is too late, and how much is too
much: it sets the limits. A project that stages nothing needs no drainer.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf
from typing import Any, NamedTuple

from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy

from ..aliases import chosen, outbox_alias
from ..jobs.drain.status import DrainerStatus
from ..models.counting import MANY, shown_count
from ..prepared.status import PreparedStatus
from ..subscriptions.lag import SubscriptionLag
from ..text import duration, one_line
from .status import OutboxStatus

BAD, WARNING = "bad", "warning"
#: Age in seconds above which a ready job is late.
LATE = 300.0
#: Seconds after which an open transaction that has written is a problem.
OLD_WRITER = 60.0
#: Seconds by which the events of a log may be late to sink while the log waits for something.
OLD_SINK = 3600.0


class Kind(NamedTuple):
    severity: str
    #: A sentence. Its values are numbers only; ``n`` decides between singular and plural.
    text: Any
    action: Any


# fmt: off
#: Every code, the most urgent first.
CODES = {
    "no_drainer": Kind(BAD, ngettext_lazy(
        "%(count)s job waits, and no drainer is running.",
        "%(count)s jobs wait, and no drainer is running.", "n"),
        _("Start manage.py drain_outbox%(on)s.")),
    "trouble": Kind(BAD, ngettext_lazy(
        "%(count)s job waits, and every drainer is in trouble.",
        "%(count)s jobs wait, and every drainer is in trouble.", "n"),
        _("Remove the cause that the drainers name; they continue by themselves.")),
    "not_leaving": Kind(BAD, ngettext_lazy(
        "%(count)s job has been ready for %(age)s.",
        "%(count)s jobs are ready, the oldest for %(age)s.", "n"),
        _("No job was published in the last minute: read the log of the drainers.")),
    "unowned_shards": Kind(BAD, ngettext_lazy(
        "%(count)s shard has no owner: its jobs do not leave until a drainer takes it.",
        "%(count)s shards have no owner: their jobs do not leave until a drainer takes them.", "n"),
        _("Start a drainer if this lasts.")),
    "subscription": Kind(BAD, ngettext_lazy(
        "%(count)s subscription has stopped.", "%(count)s subscriptions have stopped.", "n"),
        _("Remove the cause that its error names, or start manage.py run_subscriptions.")),
    "database": Kind(BAD, ngettext_lazy(
        "%(count)s database of logs or entities cannot be read, or has no outbox tables.",
        "%(count)s databases of logs or entities cannot be read, or have no outbox tables.", "n"),
        _("The figures lack what it holds: make it available, or migrate it.")),
    "no_check_back": Kind(BAD, ngettext_lazy(
        "%(count)s prepared event waits for a check-back, and no process asks its sender.",
        "%(count)s prepared events wait for check-backs, and no process asks their senders.", "n"),
        _("Start manage.py run_prepared%(on)s.")),
    "max_age": Kind(
        BAD, _("The oldest ready job is %(age)s s old; the limit is %(limit)s s."),
        _("Start more drainers, or find out what slows them down.")),
    "max_backlog": Kind(BAD, ngettext_lazy(
        "%(count)s job is ready; the limit is %(limit)s.",
        "%(count)s jobs are ready; the limit is %(limit)s.", "n"),
        _("Start more drainers, or find out what slows them down.")),
    "max_dead": Kind(BAD, ngettext_lazy(
        "%(count)s dead job; the limit is %(limit)s.",
        "%(count)s dead jobs; the limit is %(limit)s.", "n"),
        _("Remove the cause, then requeue or discard them.")),
    "late": Kind(WARNING, ngettext_lazy(
        "%(count)s job has been ready for %(age)s.",
        "%(count)s jobs are ready, the oldest for %(age)s.", "n"),
        _("Start more drainers, or find out what slows them down.")),
    "drainer_silent": Kind(WARNING, ngettext_lazy(
        "%(count)s drainer is silent beyond its lease: its jobs wait for another drainer.",
        "%(count)s drainers are silent beyond their lease: their jobs wait for another drainer.",
        "n"),
        _("Start the drainer again, or another one.")),
    "drainer_trouble": Kind(WARNING, ngettext_lazy(
        "%(count)s drainer is in trouble.", "%(count)s drainers are in trouble.", "n"),
        _("Remove the cause that the drainer names; it continues by itself.")),
    "paused": Kind(WARNING, ngettext_lazy(
        "%(count)s subscription is paused, and behind.",
        "%(count)s subscriptions are paused, and behind.", "n"),
        _("Resume the subscription when the reason for its pause is gone.")),
    "undeclared": Kind(WARNING, ngettext_lazy(
        "%(count)s subscription is not declared, and no process runs it.",
        "%(count)s subscriptions are not declared, and no process runs them.", "n"),
        _("If it was removed from the code, forget it (manage.py outbox_subscriptions forget NAME, "
          "or the admin): it keeps events from being pruned. If other code declares it, start "
          "run_subscriptions there.")),
    "parked": Kind(WARNING, ngettext_lazy(
        "%(count)s stream is parked.", "%(count)s streams are parked.", "n"),
        _("Correct the handler, then release the streams. Streams with a gap wait for it.")),
    "dead": Kind(WARNING, ngettext_lazy(
        "%(count)s job has died in the last hour.",
        "%(count)s jobs have died in the last hour.", "n"),
        _("Remove the cause, then requeue or discard them.")),
    "undecided": Kind(WARNING, ngettext_lazy(
        "%(count)s prepared event is undecided.",
        "%(count)s prepared events are undecided.", "n"),
        _("Find out whether its sender's transaction has committed, then confirm or cancel it.")),
    "sender_silent": Kind(WARNING, ngettext_lazy(
        "%(count)s sender of prepared events does not answer.",
        "%(count)s senders of prepared events do not answer.", "n"),
        _("Remove the cause that is shown; run_prepared asks the sender again by itself.")),
    "peer_clock": Kind(WARNING, ngettext_lazy(
        "The clock of %(count)s peer is wrong by more than a minute.",
        "The clocks of %(count)s peers are wrong by more than a minute.", "n"),
        _("Set the clock of the peer, or of this host: requests and answers are refused.")),
    "contradiction": Kind(WARNING, ngettext_lazy(
        "%(count)s contradiction about prepared events in the last day.",
        "%(count)s contradictions about prepared events in the last day.", "n"),
        _("Read the incidents: an event was decided against its sender's transaction.")),
    "gaps": Kind(WARNING, ngettext_lazy(
        "%(count)s gap is open.", "%(count)s gaps are open.", "n"),
        _("Look for the missing events; skip the gaps that remain.")),
    "sink": Kind(WARNING, ngettext_lazy(
        "%(count)s log does not sink.", "%(count)s logs do not sink.", "n"),
        _("Repair or start what the log waits for; its old events then sink by themselves.")),
    "transaction": Kind(
        WARNING, _("A transaction that writes has been open for %(age)s."),
        _("Its jobs and events wait for its commit. End the transaction if it hangs.")),
    "snapshot": Kind(
        WARNING, _("A transaction has been open for %(age)s: it keeps deleted rows in the tables."),
        _("They slow the batches down: end the transaction.")),
}
# fmt: on
#: The text of ``no_drainer`` if no job waits.
IDLE = _("No drainer is running.")


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


@dataclass(frozen=True, slots=True)
class Subject:
    """What has the problem: a drainer, a subscription, a table."""

    name: str
    #: Why, in the words of the exception if there is one.
    why: str = ""
    #: For how long, in seconds; None if that is unknown.
    seconds: float | None = None
    #: Primary key of its row.
    key: str = ""


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that needs a person."""

    #: A key of ``CODES``, for programs.
    code: str
    values: dict[str, Any]
    subjects: tuple[Subject, ...] = ()

    @property
    def severity(self) -> str:
        """``bad`` or ``warning``."""
        return CODES[self.code].severity

    @property
    def text(self) -> str:
        """A sentence that anybody may see: it holds numbers, and no names."""
        is_idle = self.code == "no_drainer" and not self.values["n"]
        return str(IDLE if is_idle else CODES[self.code].text % self.values)

    @property
    def action(self) -> str:
        """What to do."""
        return str(CODES[self.code].action % self.values)

    @property
    def detail(self) -> str:
        """Names, and the exceptions' own words, for the operators of the project."""
        return "; ".join(
            f"{one_line(each.name, 100)}: {one_line(each.why, 200)}" for each in self.subjects
        )

    def as_json(self) -> dict[str, str]:
        """Return the problem for programs."""
        names = ("code", "severity", "text", "detail", "action")
        return {name: getattr(self, name) for name in names}


NO_LIMITS = Limits()


def problems(status: OutboxStatus, limits: Limits = NO_LIMITS) -> list[Problem]:
    """Return what is wrong in ``outbox_status()``, the most urgent first."""
    still = [Subject(each.log, each.waits_for, each.behind_seconds) for each in status.sinks
             if each.waits_for and each.behind_seconds > OLD_SINK]  # fmt: skip
    wrong = [Subject(peer, f"{seconds:+d} s") for peer, seconds in status.clocks.items()]
    with chosen(""):  # the alias that commands use by default, not the one that the admin shows
        on = "" if status.database == outbox_alias() else f" --database {status.database}"
    looked_for = [
        *_of_drainers(status, on),
        *_of_lateness(status, limits),
        *_of_subscriptions(status.subscriptions),
        *_of_dead(status, limits),
        *_of_transactions(status),
        *(_of_prepared(status.prepared, on) if status.prepared else ()),
        _named("peer_clock", wrong),
        _named("database", [Subject(alias, why) for alias, why in status.away.items()]),
        _named("sink", still),
        _counted("gaps", status.gaps),
    ]
    # ``no_drainer`` is a problem even if no job waits. Any other problem has a count above 0.
    found = [each for each in looked_for if each.values.get("n") != 0 or each.code == "no_drainer"]
    order = list(CODES)
    return sorted(found, key=lambda each: order.index(each.code))


def is_healthy(found: list[Problem]) -> bool:
    return all(each.severity != BAD for each in found)


def _of_drainers(status: OutboxStatus, on: str) -> Iterator[Problem]:
    alive = status.alive
    silent = [_drainer(each, "silent beyond its lease") for each in status.drainers
              if each.is_silent]  # fmt: skip
    troubled = [_drainer(each, each.drainer.trouble) for each in alive if each.drainer.trouble]
    if not alive:
        if status.stages:
            yield _counted("no_drainer", status.waiting, *silent, on=on)
        return
    if status.waiting and len(troubled) == len(alive):
        yield _counted("trouble", status.waiting, *troubled)
    else:
        yield _counted("unowned_shards", len(status.unowned_shards))
        yield _named("drainer_trouble", troubled)
    yield _named("drainer_silent", silent)


def _of_lateness(status: OutboxStatus, limits: Limits) -> Iterator[Problem]:
    age, waiting = status.backlog.oldest_seconds, status.waiting
    # If no drainer works, that problem has been reported already.
    if age > LATE and not all(each.drainer.trouble for each in status.alive):
        if not any(map(status.is_publishing, status.alive)):  # immediate delivery does not count
            yield _counted("not_leaving", waiting, age=duration(age))
        elif limits.max_age is None:
            yield _counted("late", waiting, age=duration(age))
    if limits.max_age is not None and age > limits.max_age:
        yield Problem("max_age", {"age": f"{age:.1f}", "limit": f"{limits.max_age:g}"})
    if limits.max_backlog is not None and waiting > limits.max_backlog:
        yield _counted("max_backlog", waiting, limit=limits.max_backlog)


def _of_subscriptions(lags: list[SubscriptionLag]) -> Iterator[Problem]:
    yield _named("subscription", [_subscription(each, why) for each in lags if (why := _why(each))])
    paused = [each for each in lags if each.state == "paused" and each.behind]
    yield _named("paused", [_subscription(each, f"{each.shown} events behind") for each in paused])
    undeclared = [each for each in lags if each.state == "undeclared"]
    behind = [_subscription(each, f"{each.shown} events behind") for each in undeclared]
    yield _named("undeclared", behind)
    parked = [each for each in lags if each.parked and each not in undeclared]
    said = "{} parked, open gaps: {}".format
    subjects = [_subscription(e, said(shown_count(e.parked), shown_count(e.gaps))) for e in parked]
    yield _counted("parked", sum(each.parked for each in parked), *subjects)


def _why(each: SubscriptionLag) -> str:
    """Return why a subscription has stopped; empty if it moves, or is not meant to."""
    if each.state == "failing":
        return each.error
    if each.state in ("paused", "undeclared") or each.served:
        return ""
    if each.state == "waiting":
        return "it has never run, and there are events" if each.unread else ""
    return "no process runs it, and it is behind" if each.behind or not each.complete else ""


def _of_dead(status: OutboxStatus, limits: Limits) -> Iterator[Problem]:
    if limits.max_dead is None:
        yield _counted("dead", status.dead.lately)
    elif status.dead.total > limits.max_dead:
        yield _counted("max_dead", status.dead.total, limit=limits.max_dead)


def _of_transactions(status: OutboxStatus) -> Iterator[Problem]:
    writers = [
        Subject(table, f"open for {duration(oldest)}", oldest)
        for table, found in status.in_flight.items()
        if (oldest := max((each.seconds or 0 for each in found.transactions), default=0))
        > OLD_WRITER
    ]
    if writers:
        age = duration(max(each.seconds or 0 for each in writers))
        yield Problem("transaction", {"age": age}, (*writers,))
    if status.snapshots.transactions:
        yield Problem("snapshot", {"age": duration(status.snapshots.transactions[0].seconds or 0)})


def _of_prepared(facts: PreparedStatus, on: str) -> Iterator[Problem]:
    yield _counted("no_check_back", 0 if facts.processes else facts.due, on=on)
    yield _counted("undecided", facts.undecided)
    silent = [Subject(each.sender, each.last_answer, each.oldest_seconds) for each in facts.silent]
    yield _named("sender_silent", silent)
    yield _counted("contradiction", facts.contradictions)


def _named(code: str, subjects: list[Subject]) -> Problem:
    return _counted(code, len(subjects), *subjects)


def _counted(code: str, count: int, *subjects: Subject, **values: Any) -> Problem:
    return Problem(code, {"n": count, "count": shown_count(count), **values}, subjects)


def _drainer(each: DrainerStatus, why: str) -> Subject:
    return Subject(str(each.drainer), why, each.silent_seconds, str(each.drainer.pk))


def _subscription(each: SubscriptionLag, why: str) -> Subject:
    return Subject(each.name, why, each.oldest_seconds if each.behind else None, each.key)
