"""What prepared events add to the core: the keeper's open events, and their retention.

A keeper is on the alias of the outbox. Fences are on the aliases of senders, which the outbox does
not know: ``outbox_prune`` needs one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import datetime
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn

from django.urls import path
from django.utils.translation import gettext, ngettext_lazy
from django.utils.translation import gettext_lazy as _

from ..aliases import outbox_alias
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
from ..models.counting import shown_count
from ..monitoring.diagnosis import counted, problem_of
from ..monitoring.figures import percentiles
from ..monitoring.status import Question
from ..retention.rows import Kept, prune
from ..text import duration, one_line
from .conf import PreparedSettings
from .fences import mark_pruned
from .models import Fence, PreparedEvent
from .run import ask_here
from .series import NAMES, Decisions, decisions
from .status import PreparedStatus, prepared_status

if TYPE_CHECKING:
    from django.urls import URLPattern

    from ..admin.tables import Table

_UNDECIDED = ("outbox_prepared.preparedevent", {"state": "undecided"})
# fmt: off
KINDS = {
    "no_check_back": ProblemKind(
        70, BAD, ngettext_lazy(
        "%(count)s prepared event waits for a check-back, and no process asks its sender.",
        "%(count)s prepared events wait for check-backs, and no process asks their senders.", "n"),
        _("Start manage.py run_prepared%(on)s."),
        place=("outbox_prepared.preparedevent", {"state": "prepared"})),
    "undecided": ProblemKind(
        170, WARNING, ngettext_lazy(
        "%(count)s prepared event is undecided.",
        "%(count)s prepared events are undecided.", "n"),
        _("Find out whether its sender's transaction has committed, then confirm or cancel it."),
        place=_UNDECIDED),
    "sender_silent": ProblemKind(
        180, WARNING, ngettext_lazy(
        "%(count)s sender of prepared events does not answer.",
        "%(count)s senders of prepared events do not answer.", "n"),
        _("Remove the cause that is shown; run_prepared asks the sender again by itself."),
        place=("outbox_prepared.preparedevent", {"state": "prepared"})),
    "contradiction": ProblemKind(
        200, WARNING, ngettext_lazy(
        "%(count)s contradiction about prepared events in the last day.",
        "%(count)s contradictions about prepared events in the last day.", "n"),
        _("Read the incidents: an event was decided against its sender's transaction."),
        place=("outbox_app.incident", {"kind": "contradiction"})),
}
# fmt: on


@dataclass(frozen=True, slots=True)
class PreparedSection(Section):
    #: None: there are no prepared events.
    facts: PreparedStatus | None
    decisions: Decisions = field(default_factory=Decisions)

    def figures(self) -> Iterator[Figure]:
        facts, decided = self.facts, self.decisions
        seconds = percentiles(decided.p50, decided.p95)
        by_route = {" ".join(key): count for key, count in decided.per_minute.items()}
        more = {"decided_per_minute": by_route, "decide_seconds": seconds}
        # fmt: off
        yield Figure(facts and asdict(facts) | more, json="prepared",
                     lines=_lines(facts, decided) if facts else (),
                     title=facts and facts.undecided and _("Undecided"), place=_UNDECIDED,
                     shown=shown_count(facts.undecided) if facts else "")
        yield Figure({state: getattr(facts, state, None) for state in ("prepared", "undecided")},
                     "outbox_prepared_events", "Prepared events that are open, up to 100001.",
                     ("state",))
        yield Figure(facts and facts.oldest_seconds, "outbox_prepared_oldest_seconds",
                     "Age of the oldest event in state prepared.")
        yield Figure(decided.per_minute, "outbox_prepared_decisions_per_minute",
                     "Prepared events decided in the last full minute.", ("outcome", "route"))
        yield Figure(seconds, "outbox_prepared_decide_seconds",
                     "Seconds from prepared to decided.", ("percentile",))
        yield Figure(facts and facts.processes, "outbox_prepared_processes",
                     "Processes that ask senders.")
        yield Figure(facts and len(facts.silent), "outbox_prepared_senders_silent",
                     "Senders that do not answer.")
        # fmt: on

    def problems(self, on: str) -> Iterator[Problem]:
        if not (facts := self.facts):
            return
        yield counted("no_check_back", 0 if facts.processes else facts.due, on=on)
        yield counted("undecided", facts.undecided)
        silent = [
            Subject(s.sender, s.last_answer, filters={"sender": s.sender}) for s in facts.silent
        ]
        yield problem_of("sender_silent", silent)
        yield counted("contradiction", facts.contradictions)

    def tables(self, site: str) -> Iterator[Table]:
        found = self.facts
        if found and (found.prepared or found.undecided or found.contradictions):
            yield _table(found, self.decisions)


def _lines(facts: PreparedStatus, decided: Decisions) -> Iterator[str]:
    age = f", the oldest {duration(facts.oldest_seconds)} old" if facts.prepared else ""
    yield (
        f"prepared    {shown_count(facts.prepared)}{age}, {shown_count(facts.undecided)} "
        f"undecided, {facts.processes} asking, {shown_count(facts.contradictions)} "
        "contradictions in 24 hours"
    )
    rates, p95 = decided.per_minute, decided.p95
    shown = ", ".join(f"{count:.0f} {' by '.join(key)}" for key, count in rates.items())
    took = "" if p95 is None else f"; p95 {duration(p95, fine=True)} after they were prepared"
    yield f"decided     {shown or 'none'} per minute{took}"


def _table(facts: PreparedStatus, decided: Decisions) -> Table:
    """Return the table on the overview. It masks what looks sensitive in the senders' answers."""
    from ..admin.masking import masked_line
    from ..admin.tables import WORDS, Table, durations, numbers, pairs

    figures = [
        (gettext("Prepared"), shown_count(facts.prepared)),
        (gettext("Oldest prepared"), duration(facts.oldest_seconds) if facts.prepared else "-"),
        (gettext("Undecided"), shown_count(facts.undecided)),
        (gettext("Processes that ask senders"), str(facts.processes)),
        (gettext("Time to decide, p50 and p95"), durations([decided.p50, decided.p95])),
        (gettext("Contradictions in the last day"), shown_count(facts.contradictions)),
    ]
    routes = {
        "call": gettext("by a call"),
        "answer": gettext("by an answer"),
        "policy": gettext("by its policy"),
        "person": gettext("by a person"),
    }
    states = dict(PreparedEvent.State.choices)
    rates = {
        f"{states.get(outcome, outcome)} {routes.get(route, route)}": count
        for (outcome, route), count in decided.per_minute.items()
    }
    silent = [
        (one_line(each.sender, 100), masked_line(each.last_answer, 200)) for each in facts.silent
    ]
    groups = [
        pairs(gettext("Figure"), gettext("Value"), figures),
        pairs(gettext("Decided"), gettext("Per minute"), numbers(rates)),
        pairs(gettext("Sender that does not answer"), gettext("Why"), silent, WORDS),
    ]
    return Table(gettext("Prepared events"), groups, anchor="prepared")


class PreparedDoors(Doors):
    name = "prepared"
    rank = 30
    settings = PreparedSettings
    counters = NAMES
    kinds = KINDS
    empty = PreparedSection(None)

    def parts(self) -> Mapping[str, Any]:
        return {"prepared": [PreparedEvent]}

    def read(self, question: Question) -> PreparedSection | None:
        using = question.database
        if not question.wants("prepared") or not is_on(using, PreparedEvent):
            return None
        facts = prepared_status(using=using)
        return PreparedSection(facts, decisions(using=using) if facts else Decisions())

    def kept(self) -> Mapping[str, Kept]:
        events = "remove prepared events that were confirmed or cancelled (table outbox_prepared)"
        fences = (
            "remove what became of a sender's transactions (table outbox_fence). Needs --database, "
            "the alias of the sender. A question about an older transaction is answered 'too_old'"
        )
        return {
            # Events that are open have no such time.
            "prepared": Kept(
                PreparedEvent, "decided_at", outbox_alias, "PREPARED_RETENTION_DAYS", events
            ),
            "fences": Kept(
                *(Fence, "written_at", _senders_alias, "FENCE_RETENTION_DAYS", fences),
                parts=_fences,
            ),
        }

    def removals(self, using: str) -> Mapping[str, Callable[..., int]]:
        found = {"prepared": partial(prune, "prepared", using)}
        return found if is_on(using, PreparedEvent) else {}

    def routes(self) -> list[URLPattern]:
        """Return the addresses that senders call, and ``check``, which keepers call."""
        from . import views

        state = {"confirm": {"state": "confirmed"}, "cancel": {"state": "cancelled"}}
        one = "prepared/<uuid:id>"
        return [
            path("prepared/", views.prepare, name="prepare"),
            path("prepared/decide", views.decide, name="decide"),
            path("prepared/open", views.open_events, name="open"),
            path(one, views.show, name="show"),
            *(path(f"{one}/{name}", views.decide_one, state[name], name=name) for name in state),
            path("check", views.check, name="check"),
        ]

    def loops(self, using: str, *, only: str | None) -> Mapping[str, Loop]:
        found = {"prepared": Loop(partial(ask_here, using))}
        return found if is_on(using, PreparedEvent) else {}


def _senders_alias() -> NoReturn:
    raise InvalidArgument(
        "Fences are in the databases of senders. Run this with --database ALIAS for each of them."
    )


def _fences(rows: Any, before: datetime, *, dry_run: bool) -> Iterable[Any]:
    if not dry_run:
        mark_pruned(before, using=rows.db)
    return [rows.exclude(pk=Fence.MARK)]


DOORS = PreparedDoors()
