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
from django.utils.translation import gettext_lazy as _
from django.utils.translation import ngettext_lazy

from ..aliases import outbox_alias
from ..capability import (
    BAD,
    WARNING,
    Doors,
    Kind,
    Loop,
    Metric,
    Problem,
    Sample,
    Section,
    Subject,
)
from ..exceptions import InvalidArgument
from ..models.counting import shown_count
from ..monitoring.diagnosis import counted, named
from ..monitoring.samples import percentiles
from ..monitoring.status import Question
from ..retention.rows import Kept, prune
from ..text import duration, one_line
from .conf import PreparedSettings
from .fences import mark_pruned
from .models import Fence, PreparedEvent
from .run import ask_here
from .series import Decisions, decisions
from .status import PreparedStatus, prepared_status

if TYPE_CHECKING:
    from django.db.models import Model
    from django.urls import URLPattern

    from ..admin.tables import Table

# fmt: off
KINDS = {
    "no_check_back": Kind(
        70, BAD, ngettext_lazy(
        "%(count)s prepared event waits for a check-back, and no process asks its sender.",
        "%(count)s prepared events wait for check-backs, and no process asks their senders.", "n"),
        _("Start manage.py run_prepared%(on)s."),
        place=("outbox_prepared.preparedevent", {"state": "prepared"})),
    "undecided": Kind(
        170, WARNING, ngettext_lazy(
        "%(count)s prepared event is undecided.",
        "%(count)s prepared events are undecided.", "n"),
        _("Find out whether its sender's transaction has committed, then confirm or cancel it."),
        place=("outbox_prepared.preparedevent", {"state": "undecided"})),
    "sender_silent": Kind(
        180, WARNING, ngettext_lazy(
        "%(count)s sender of prepared events does not answer.",
        "%(count)s senders of prepared events do not answer.", "n"),
        _("Remove the cause that is shown; run_prepared asks the sender again by itself."),
        place=("outbox_prepared.preparedevent", {"state": "prepared"})),
    "contradiction": Kind(
        200, WARNING, ngettext_lazy(
        "%(count)s contradiction about prepared events in the last day.",
        "%(count)s contradictions about prepared events in the last day.", "n"),
        _("Read the incidents: an event was decided against its sender's transaction."),
        place=("outbox_app.incident", {"kind": "contradiction"})),
}
# fmt: on
METRICS = {
    "outbox_prepared_events": Metric("Prepared events that are open, up to 100001.", ("state",)),
    "outbox_prepared_oldest_seconds": Metric("Age of the oldest event in state prepared."),
    "outbox_prepared_decisions_per_minute": Metric(
        "Prepared events decided in the last full minute.",
        ("outcome", "route"),
    ),
    "outbox_prepared_decide_seconds": Metric("Seconds from prepared to decided.", ("percentile",)),
    "outbox_prepared_processes": Metric("Processes that ask senders."),
    "outbox_prepared_senders_silent": Metric("Senders that do not answer."),
}


@dataclass(frozen=True, slots=True)
class PreparedSection(Section):
    #: None: there are no prepared events.
    facts: PreparedStatus | None
    decisions: Decisions = field(default_factory=Decisions)

    def as_json(self) -> dict[str, Any]:
        if not self.facts:
            return {"prepared": None}
        decided = self.decisions
        by_route = {" ".join(key): count for key, count in decided.per_minute.items()}
        seconds = {"p50": decided.p50, "p95": decided.p95}
        figures = {"decided_per_minute": by_route, "decide_seconds": seconds}
        return {"prepared": asdict(self.facts) | figures}

    def lines(self) -> Iterator[str]:
        if not (facts := self.facts):
            return
        age = f", the oldest {duration(facts.oldest_seconds)} old" if facts.prepared else ""
        yield (
            f"prepared    {shown_count(facts.prepared)}{age}, {shown_count(facts.undecided)} "
            f"undecided, {facts.processes} asking, {shown_count(facts.contradictions)} "
            "contradictions in 24 hours"
        )
        rates, p95 = self.decisions.per_minute, self.decisions.p95
        shown = ", ".join(f"{count:.0f} {' by '.join(key)}" for key, count in rates.items())
        took = "" if p95 is None else f"; p95 {duration(p95, fine=True)} after they were prepared"
        yield f"decided     {shown or 'none'} per minute{took}"
        for each in facts.silent:
            yield f"  {one_line(each.sender, 60):<30} SILENT: {one_line(each.last_answer, 200)}"

    def problems(self, on: str) -> Iterator[Problem]:
        if not (facts := self.facts):
            return
        yield counted("no_check_back", 0 if facts.processes else facts.due, on=on)
        yield counted("undecided", facts.undecided)
        silent = [
            Subject(s.sender, s.last_answer, s.oldest_seconds, filters={"sender": s.sender})
            for s in facts.silent
        ]
        yield named("sender_silent", silent)
        yield counted("contradiction", facts.contradictions)

    def samples(self) -> Iterator[Sample]:
        if not (facts := self.facts):
            return
        decided = self.decisions
        for state in ("prepared", "undecided"):
            yield "outbox_prepared_events", (state,), getattr(facts, state)
        yield "outbox_prepared_oldest_seconds", (), facts.oldest_seconds
        for labels, count in decided.per_minute.items():
            yield "outbox_prepared_decisions_per_minute", labels, count
        yield from percentiles("outbox_prepared_decide_seconds", decided.p50, decided.p95)
        yield "outbox_prepared_processes", (), facts.processes
        yield "outbox_prepared_senders_silent", (), len(facts.silent)

    def figures(self, site: str) -> Iterator[tuple[str, str, str, str]]:
        from ..admin.base import address

        if self.facts:
            undecided = address(site, "outbox_prepared.preparedevent", state="undecided")
            yield str(_("Undecided")), shown_count(self.facts.undecided), "", undecided

    def tables(self, site: str, may_view: Callable[[type[Model]], bool]) -> Iterator[Table]:
        from .tables import prepared

        if self.facts:
            yield prepared(self.facts, self.decisions)


class PreparedDoors(Doors):
    name = "prepared"
    rank = 30
    settings = PreparedSettings
    kinds = KINDS
    metrics = METRICS

    def parts(self) -> Mapping[str, Any]:
        return {"prepared": [PreparedEvent]}

    def read(self, question: Question) -> PreparedSection | None:
        if not question.wants("prepared"):
            return None
        using = question.database
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
        return {"prepared": partial(prune, "prepared", using)}

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
        return {"prepared": Loop(partial(ask_here, using))}


def _senders_alias() -> NoReturn:
    raise InvalidArgument(
        "Fences are in the databases of senders. Run this with --database ALIAS for each of them."
    )


def _fences(rows: Any, before: datetime, *, dry_run: bool) -> Iterable[Any]:
    if not dry_run:
        mark_pruned(before, using=rows.db)
    return [rows.exclude(pk=Fence.MARK)]


DOORS = PreparedDoors()
