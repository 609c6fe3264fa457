"""What blocks: transactions in flight, held snapshots, and the problems that keep rows waiting.

The table names the session, its user, its age, and what it keeps waiting. The text of its query may
contain anyone's data, so it needs a permission of its own.
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
#: By code, the problems whose subjects keep rows waiting: what a subject is, and its effect.
BLOCKING: dict[str, tuple[Any, Any]] = {
    "no_drainer": _SILENT,
    "drainer_silent": _SILENT,
    "trouble": _TROUBLE,
    "drainer_trouble": _TROUBLE,
    "subscription": (gettext_lazy("Subscription stopped"), _EVENTS),
    "paused": (gettext_lazy("Subscription paused"), _EVENTS),
}

#: The cells of a row: what blocks, who, for how long, the query or error, and the effect.
Row = tuple[Any, str, str, str, Any]


def blocking(request: HttpRequest, status: OutboxStatus, found: list[Problem]) -> Table:
    may_read = may_read_queries(request)
    rows: dict[str, Row] = {}
    for table, open_ in status.in_flight.items():
        effect = (
            _("Its jobs leave when it commits; other jobs do not wait.")
            if table == StagedJob._meta.db_table
            else _("Its events are read when it commits; other events do not wait.")
        )
        what = _("In flight on %(table)s") % {"table": table}
        # Show each once: MySQL does not tell the table, so every table has the same transactions.
        for row in _transactions(open_, what, effect, may_read):
            rows.setdefault(row[1], row)
    effect = _("Deleted rows stay in the tables, and slow the batches down.")
    for row in _transactions(status.snapshots, _("Held snapshot"), effect, may_read):
        rows.setdefault(row[1], row)
    columns = {_("What"): "", _("Who"): WORDS, _("For"): SHORT, _("Query or error"): WORDS,
               _("Effect"): WORDS}  # fmt: skip
    group = Group(columns, [*_subjects(found), *rows.values()])
    return Table(_("What blocks"), [group], anchor="blocking", empty=_("Nothing."))


def may_read_queries(request: HttpRequest) -> bool:
    return request.user.has_perm("outbox_app.view_query_process")


def _subjects(found: list[Problem]) -> Iterator[Row]:
    for problem in found:
        if problem.code == "no_drainer" and not problem.subjects:
            yield _("No drainer"), "", "-", "", _("All jobs wait.")
        elif problem.code in BLOCKING:
            what, effect = BLOCKING[problem.code]
            for each in problem.subjects:
                age = "-" if each.seconds is None else duration(each.seconds)
                yield what, one_line(each.name, 100), age, masked_line(each.why, 200), effect


def _transactions(found: LongTransactions, what: str, effect: str, may_read: bool) -> Iterator[Row]:
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
