"""What blocks: transactions in flight, held snapshots, and the problems that keep rows waiting.

Which session, whose, for how long, and what it keeps waiting. The text of its query may hold data
of anybody: it takes a permission of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.http import HttpRequest
from django.utils.translation import gettext as _
from django.utils.translation import gettext_lazy

from ..eventlog.long_transactions import LongTransaction, LongTransactions
from ..models import StagedJob
from ..monitoring.diagnosis import Problem
from ..monitoring.status import OutboxStatus
from ..text import duration, one_line
from .masking import masked_line
from .tables import SHORT, WORDS, Group, Table

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

#: What, who, for how long, its query or error, and what it does.
Row = tuple[Any, str, str, str, Any]


def blocking(request: HttpRequest, status: OutboxStatus, found: list[Problem]) -> Table:
    rows = _in_flight(request, status.in_flight)
    effect = _("Deleted rows stay in the tables: batches take longer.")
    for row in _transactions(request, status.snapshots, _("Held snapshot"), effect):
        rows.setdefault(row[1], row)
    return _table(_("What blocks"), [*_subjects(found), *rows.values()])


def in_flight_table(request: HttpRequest, found: dict[str, LongTransactions]) -> Table:
    return _table(_("In flight"), [*_in_flight(request, found).values()])


def _in_flight(request: HttpRequest, found: dict[str, LongTransactions]) -> dict[str, Row]:
    """Return the transactions, once each: MySQL does not say on which table."""
    rows: dict[str, Row] = {}
    for table, open_ in found.items():
        effect = (
            _("Its jobs leave when it commits; others do not wait.")
            if table == StagedJob._meta.db_table
            else _("Its events come when it commits; others do not wait.")
        )
        what = _("In flight on %(table)s") % {"table": table}
        for row in _transactions(request, open_, what, effect):
            rows.setdefault(row[1], row)
    return rows


def _table(caption: str, rows: list[Row]) -> Table:
    columns = {_("What"): "", _("Who"): WORDS, _("For"): SHORT, _("Query or error"): WORDS,
               _("What it does"): WORDS}  # fmt: skip
    return Table(caption, [Group(columns, rows)], anchor="blocking", empty=_("Nothing."))


def _subjects(found: list[Problem]) -> Iterator[Row]:
    for problem in found:
        if problem.code == "no_drainer" and not problem.subjects:
            yield _("No drainer"), "", "-", "", _("All jobs wait.")
        elif problem.code in BLOCKING:
            what, effect = BLOCKING[problem.code]
            for each in problem.subjects:
                age = "-" if each.seconds is None else duration(each.seconds)
                yield what, one_line(each.name, 100), age, masked_line(each.why, 200), effect


def _transactions(
    request: HttpRequest, found: LongTransactions, what: str, effect: str
) -> Iterator[Row]:
    may_read = request.user.has_perm("outbox_app.view_query_process")
    unseen = _("not permitted to see")
    for holder in found.transactions:
        age = unseen if holder.seconds is None else duration(holder.seconds)
        query = one_line(holder.query, 300) if may_read else _("hidden")
        yield what, _who(holder), age, query, effect
    if found.denied:
        yield what, unseen, "", one_line(found.denied, 200), ""


def _who(holder: LongTransaction) -> str:
    kind = _("prepared transaction") if holder.prepared else _("session")
    user = one_line(holder.user, 80) or "?"
    return f"{kind} {one_line(holder.id, 80)}, {user}, {one_line(holder.state, 40)}"
