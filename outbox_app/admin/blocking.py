"""What blocks: transactions in flight, held snapshots, and the problems that keep rows waiting.

Which session, whose, for how long, and what it keeps waiting. The text of its query may hold data
of anybody: it takes a permission of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..eventlog.long_transactions import LongTransaction, LongTransactions
from ..models import StagedJob
from ..monitoring.diagnosis import Problem, Subject
from ..monitoring.status import OutboxStatus
from ..text import duration, one_line
from .masking import masked_line

_SILENT = gettext_lazy("Drainer silent"), gettext_lazy("The jobs of its shards wait.")
_TROUBLE = gettext_lazy("Drainer in trouble"), gettext_lazy("The jobs of its shards wait.")
_EVENTS = gettext_lazy("Its events wait, and are not pruned.")
#: Problems whose subjects keep rows waiting: what such a subject is, and what it does.
BLOCKING: dict[str, tuple[Any, Any]] = {
    "no_drainer": _SILENT,
    "drainer_silent": _SILENT,
    "trouble": _TROUBLE,
    "drainer_trouble": _TROUBLE,
    "subscription": (gettext_lazy("Subscription stopped"), _EVENTS),
    "paused": (gettext_lazy("Subscription paused"), _EVENTS),
}


@dataclass(frozen=True, slots=True)
class Blocker:
    what: Any
    #: Session or prepared transaction, and its user.
    who: str
    age: str
    query: str
    effect: Any


def blocking(request: HttpRequest, status: OutboxStatus, found: list[Problem]) -> list[Blocker]:
    may_read = may_read_queries(request)
    rows: dict[str, Blocker] = {}
    for table, open_ in status.in_flight.items():
        effect = (
            _("Its jobs leave when it commits; others do not wait.")
            if table == StagedJob._meta.db_table
            else _("Its events come when it commits; others do not wait.")
        )
        what = _("In flight on %(table)s") % {"table": table}
        # Once each: MySQL does not say on which table, so that each has the same ones.
        for row in _transactions(open_, what, effect, may_read):
            rows.setdefault(row.who, row)
    effect = _("Deleted rows stay in the tables: batches take longer.")
    for row in _transactions(status.snapshots, _("Held snapshot"), effect, may_read):
        rows.setdefault(row.who, row)
    return [*_subjects(found), *rows.values()]


def may_read_queries(request: HttpRequest) -> bool:
    return request.user.has_perm("outbox_app.view_query_process")


def _subjects(found: list[Problem]) -> Iterator[Blocker]:
    for problem in found:
        if problem.code == "no_drainer" and not problem.subjects:
            yield Blocker(_("No drainer"), "", "-", "", _("All jobs wait."))
        elif problem.code in BLOCKING:
            what, effect = BLOCKING[problem.code]
            for each in problem.subjects:
                yield Blocker(what, one_line(each.name, 100), _age(each),
                              masked_line(each.why, 200), effect)  # fmt: skip


def _age(subject: Subject) -> str:
    return "-" if subject.seconds is None else duration(subject.seconds)


def _transactions(
    found: LongTransactions, what: str, effect: str, may_read: bool
) -> Iterator[Blocker]:
    for holder in found.transactions:
        yield Blocker(
            what,
            _who(holder),
            _("not permitted to see") if holder.seconds is None else duration(holder.seconds),
            one_line(holder.query, 300) if may_read else _("hidden"),
            effect,
        )
    if found.denied:
        yield Blocker(what, _("not permitted to see"), "", one_line(found.denied, 200), "")


def _who(holder: LongTransaction) -> str:
    kind = _("prepared transaction") if holder.prepared else _("session")
    user = one_line(holder.user, 80) or "?"
    return f"{kind} {one_line(holder.id, 80)}, {user}, {one_line(holder.state, 40)}"
