"""What events add to the core: subscriptions, gaps, logs that sink, and retention of events.

Subscriptions and gaps are read on the alias of ``Event``, and sinks on the alias of each log. If
the first alias cannot be read, the section is empty, and the status says why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import chain
from typing import TYPE_CHECKING, Any

from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy

from ..aliases import model_alias
from ..capability import (
    BAD,
    WARNING,
    Doors,
    Figure,
    Loop,
    Problem,
    ProblemKind,
    Section,
    Subject,
    is_on,
)
from ..exceptions import InvalidArgument
from ..models import counting
from ..models.counting import shown_count
from ..monitoring.diagnosis import counted, problem_of
from ..monitoring.long_transactions import open_writers
from ..monitoring.status import Question
from ..retention.rows import prune
from ..text import duration, one_line
from . import series
from .conf import EventSettings, event_settings
from .log.registry import all_logs
from .loops import loops
from .models import Event, EventLog, Gap, Subscription
from .retention import chosen_events, prune_events
from .series import EventsPerMinute
from .sink import SinkStatus, sink_status
from .subscriptions import lag
from .subscriptions.lag import SubscriptionLag

if TYPE_CHECKING:
    from django.utils.safestring import SafeString

    from ..admin.tables import Table

#: Seconds by which the events of a log may be late to sink while the log waits for something.
OLD_SINK = 3600.0
#: How many gaps the overview shows. Their list has the rest.
FEW = 10

_SUBSCRIPTIONS = ("outbox_events.subscription", dict[str, str]())
_OPEN_GAPS = ("outbox_events.gap", {"state": "open"})
# fmt: off
KINDS = {
    "failing": ProblemKind(
        50, BAD, ngettext_lazy(
        "%(count)s subscription is failing.", "%(count)s subscriptions are failing.", "n"),
        _("Remove the cause; it tries again by itself. Its events wait, and are not pruned."),
        place=_SUBSCRIPTIONS, has_cause=True),
    "subscription": ProblemKind(
        55, BAD, ngettext_lazy(
        "%(count)s subscription is stopped.", "%(count)s subscriptions are stopped.", "n"),
        _("Start manage.py run_subscriptions. Its events wait, and are not pruned."),
        place=_SUBSCRIPTIONS),
    "paused": ProblemKind(
        140, WARNING, ngettext_lazy(
        "%(count)s subscription is paused, and behind.",
        "%(count)s subscriptions are paused, and behind.", "n"),
        _("Resume the subscription when the reason for its pause is gone."),
        place=_SUBSCRIPTIONS),
    "undeclared": ProblemKind(
        145, WARNING, ngettext_lazy(
        "%(count)s subscription is not declared, and no process runs it.",
        "%(count)s subscriptions are not declared, and no process runs them.", "n"),
        _("If it was removed from the code, forget it (manage.py outbox_subscriptions forget NAME, "
          "or the admin): it keeps events from being pruned. If other code declares it, start "
          "run_subscriptions there."),
        place=_SUBSCRIPTIONS),
    "parked": ProblemKind(
        150, WARNING, ngettext_lazy(
        "%(count)s stream is parked.", "%(count)s streams are parked.", "n"),
        _("Correct the handler, then release the streams. Streams with a gap wait for it."),
        place=("outbox_events.parkedstream", {})),
    "gaps": ProblemKind(
        210, WARNING, ngettext_lazy(
        "%(count)s gap is open.", "%(count)s gaps are open.", "n"),
        _("Look for the missing events; skip the gaps that remain."),
        place=_OPEN_GAPS),
    "sink": ProblemKind(
        220, WARNING, ngettext_lazy(
        "%(count)s log does not sink.", "%(count)s logs do not sink.", "n"),
        _("Repair or start what the log waits for; its old events then sink by themselves."),
        place="#outbox-sinks"),
}
# fmt: on


@dataclass(frozen=True, slots=True, kw_only=True)
class EventsSection(Section):
    """The facts of events. A part that was left out is empty."""

    #: Alias of ``Event``.
    database: str = ""
    #: Which of ``subscriptions`` and ``gaps`` were read.
    parts: frozenset[str] = frozenset({"subscriptions", "gaps"})
    subscriptions: list[SubscriptionLag] = field(default_factory=list)
    #: Logs whose old events leave the database.
    sinks: list[SinkStatus] = field(default_factory=list)
    #: Open gaps, counted up to MANY + 1.
    gaps: int = 0
    per_minute: EventsPerMinute = field(default_factory=EventsPerMinute)

    def figures(self) -> Iterator[Figure]:
        lags, rate, gaps = self.subscriptions, self.per_minute, shown_count(self.gaps)
        per_minute = f"events      {rate.handled:.0f} handled, {rate.failed:.0f} failed per minute"
        late = (each.oldest_seconds for each in lags if each.state != "undeclared")
        known = [each for each in lags if each.cursors and all(c.behind for c in each.cursors)]
        label = ("subscription",)
        # fmt: off
        yield Figure(asdict(rate), "outbox_events_per_minute",
                     "Events of the last full minute, by outcome.", ("outcome",),
                     json="events_per_minute", lines=[per_minute] if lags else ())
        yield Figure([each.as_json() for each in lags], json="subscriptions",
                     lines=map(_line, lags), note=_("the slowest"),
                     title=lags and _("Subscriptions behind"),
                     shown=duration(max(late, default=0.0)), place=_SUBSCRIPTIONS)
        yield Figure({(each.name, each.state): 1 for each in lags}, "outbox_subscription_state",
                     "1 for the state of a subscription: running, stopped, failing, paused, "
                     "waiting, undeclared.", ("subscription", "state"))
        yield Figure({each.name: each.behind for each in known},
                     "outbox_subscription_behind_events",
                     "Events that a subscription has not passed, as far as they were counted.",
                     label)
        yield Figure({each.name: each.oldest_seconds for each in known},
                     "outbox_subscription_oldest_seconds",
                     "Age of the oldest event that a subscription has not passed.", label)
        yield Figure({each.name: each.handled for each in lags},
                     "outbox_subscription_handled_events_total",
                     "Events that a subscription has handled.", label)
        yield Figure({each.name: each.parked for each in lags},
                     "outbox_subscription_parked_streams",
                     "Streams that a subscription has parked.", label)
        yield Figure(self.gaps, "outbox_gaps_open", "Gaps of the logs that are open.", json="gaps",
                     lines=[f"gaps        {gaps} open"] if lags or self.gaps else (),
                     title=self.gaps and _("Open gaps"), shown=gaps, place=_OPEN_GAPS)
        yield Figure([asdict(each) for each in self.sinks], json="sinks",
                     lines=chain.from_iterable(map(_sink_lines, self.sinks)))
        # fmt: on

    def problems(self, on: str) -> Iterator[Problem]:
        lags = self.subscriptions
        failing = [each for each in lags if each.state == "failing"]
        yield problem_of("failing", [_subject(each, each.error) for each in failing])
        stopped = [_subject(each, why) for each in lags if (why := _why(each))]
        yield problem_of("subscription", stopped)
        paused = [each for each in lags if each.state == "paused" and each.behind]
        yield problem_of(
            "paused", [_subject(each, f"{each.shown} events behind") for each in paused]
        )
        undeclared = [each for each in lags if each.state == "undeclared"]
        behind = [_subject(each, f"{each.shown} events behind") for each in undeclared]
        yield problem_of("undeclared", behind)
        parked = [each for each in lags if each.parked and each not in undeclared]
        yield counted("parked", sum(each.parked for each in parked), *map(_parked, parked))
        still = [Subject(each.log, each.waits_for) for each in self.sinks
                 if each.waits_for and each.behind_seconds > OLD_SINK]  # fmt: skip
        yield problem_of("sink", still)
        yield counted("gaps", self.gaps)

    def charts(self) -> Iterator[SafeString]:
        from .admin.tables import events_chart

        if self.subscriptions:
            yield events_chart()

    def tables(self, site: str) -> Iterator[Table]:
        from .admin import tables

        if "subscriptions" in self.parts:
            yield tables.subscriptions(site, self.subscriptions)
        if self.sinks:
            yield tables.sinks(self.sinks)
        if "gaps" in self.parts:
            rows = Gap.objects.using(self.database).open()
            yield tables.gaps(site, rows.order_by("-seen_at")[:FEW])


def _line(each: SubscriptionLag) -> str:
    late = f", the oldest {duration(each.oldest_seconds)} old" if each.behind else ""
    parked = f"  {each.parked} streams parked" if each.parked else ""
    name = f"{one_line(each.name, 60):<30} {each.state:<10}"
    return f"  {name} {each.shown} behind{late}{parked}"


def _sink_lines(each: SinkStatus) -> Iterator[str]:
    oldest = "empty"
    if each.position is not None:
        oldest = f"the oldest {duration(each.oldest_seconds)} old, position {each.position}"
    behind = f", {duration(each.behind_seconds)} behind" if each.behind_seconds else ""
    yield f"sink        {each.log} after {each.days} d: {oldest}{behind}"
    if each.waits_for:
        yield f"  waits for: {one_line(each.waits_for, 200)}"


def _why(each: SubscriptionLag) -> str:
    """Return why a subscription is stopped; empty if it moves, or is not meant to."""
    if each.state in ("failing", "paused", "undeclared") or each.served:
        return ""
    if each.state == "waiting":
        return "it has never run, and there are events" if each.unread else ""
    return "no process runs it, and it is behind" if each.behind or not each.complete else ""


def _subject(each: SubscriptionLag, why: str) -> Subject:
    return Subject(each.name, why, each.key)


def _parked(each: SubscriptionLag) -> Subject:
    why = f"{shown_count(each.parked)} parked, open gaps: {shown_count(each.gaps)}"
    return Subject(each.name, why, filters={"subscription": each.key})


class EventsDoors(Doors):
    name = "events"
    rank = 10
    settings = EventSettings
    counters = series.NAMES
    prunes = ("--events", "--archived DIR")
    kinds = KINDS
    empty = EventsSection()

    def parts(self) -> Mapping[str, Any]:
        return {"subscriptions": [Subscription], "gaps": [Gap]}

    def aliases(self) -> set[str]:
        return {*map(model_alias, all_logs())}

    def models(self) -> list[type[EventLog]]:
        return all_logs()

    def read(self, question: Question) -> EventsSection | None:
        using = question.using or model_alias(Event)
        if not is_on(using, Subscription):
            return None
        parts = frozenset(part for part in self.parts() if question.wants(part))
        if not question.can_read(using):
            parts = frozenset()
        facts: dict[str, Any] = {}
        if "subscriptions" in parts:
            facts |= {
                "subscriptions": lag.lags(using=using),
                "sinks": sink_status(using=question.using),
            }
            question.in_flight.update(open_writers(*all_logs(using=using), using=using))
        if "gaps" in parts:
            facts["gaps"] = counting.counted(Gap.objects.using(using).open())
        if question.wants("history") and using not in question.away:
            facts["per_minute"] = series.per_minute(using=using)
        return EventsSection(database=using, parts=parts, **facts)

    def prune_arguments(self, add: Callable[..., Any]) -> None:
        events = (
            "remove old events, from the oldest one on. It stops at the first event that is too "
            "young or that a subscription has not handled, and prints why. Versions of streams "
            "continue where they were (EVENT_RETENTION_DAYS is "
            f"{event_settings().EVENT_RETENTION_DAYS})"
        )
        add("--events", action="store_true", help=events)
        archived = (
            "like --events, but only events that the archive DIR holds as they are: each row is "
            "compared first (see manage.py outbox_pipeline archive). It prunes one log: --log, or "
            "outbox_event"
        )
        add("--archived", metavar="DIR", help=archived)
        log = "table of one log (default: all but those of SINK; with --archived outbox_event)"
        add("--log", metavar="LOG", help=log)

    def pruning(self, options: Mapping[str, Any]) -> Callable[..., int] | None:
        log, archive, older_than = (options[name] for name in ("log", "archived", "older_than"))
        if not (options["events"] or archive):
            if log:
                raise InvalidArgument("--log needs --events or --archived.")
            return None
        chosen_events(log, older_than)
        return partial(prune_events, using=options["database"], log=log, archive=archive)

    def removals(self, using: str) -> Mapping[str, Callable[..., int]]:
        found: dict[str, Callable[..., int]] = {}
        for alias in self.aliases() - {using}:  # perhaps without a drainer
            found[f"counters:{alias}"] = partial(prune, "counters", alias)
        if event_settings().EVENT_RETENTION_DAYS is not None:
            found["events"] = prune_events
        return found

    def loops(self, using: str, *, only: str | None) -> Mapping[str, Loop]:
        return loops(only)


DOORS = EventsDoors()
