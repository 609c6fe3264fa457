"""What blocks: transactions in flight, and held snapshots.

The table names the session, its user, its age, and what it keeps waiting. The text of its query may
contain anyone's data, so it needs a permission of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Any

from django.http import HttpRequest
from django.utils.translation import gettext as _

from ..models import StagedJob
from ..monitoring.long_transactions import LongTransaction, LongTransactions
from ..monitoring.status import OutboxStatus
from ..text import duration, one_line
from .tables import SHORT, WORDS, Group, Table

#: The cells of a row: what blocks, who, for how long, the query or error, and the effect.
Row = tuple[Any, str, str, str, Any]


def blocking(request: HttpRequest, status: OutboxStatus) -> Table:
    rows = _transactions(request, status.in_flight, status.snapshots)
    return _table(_("What blocks"), rows, anchor="blocking")


def in_flight_table(request: HttpRequest, found: dict[str, LongTransactions]) -> Table:
    none = LongTransactions([])
    rows = (_transactions(request, {log: open_}, none) for log, open_ in found.items())
    return _table(_("Transactions in flight"), chain.from_iterable(rows))


def _table(caption: str, rows: Iterable[Row], **options: str) -> Table:
    columns = {_("What"): "", _("Who"): WORDS, _("For"): SHORT, _("Query or error"): WORDS,
               _("Effect"): WORDS}  # fmt: skip
    return Table(caption, [Group(columns, [*rows])], **options)


def _transactions(
    request: HttpRequest, in_flight: dict[str, LongTransactions], snapshots: LongTransactions
) -> Iterable[Row]:
    kinds = [(_("In flight on %(table)s") % {"table": table}, _effect(table), found)
             for table, found in in_flight.items()]  # fmt: skip
    effect = _("Deleted rows stay in the tables, and slow the batches down.")
    kinds.append((_("Held snapshot"), effect, snapshots))
    may_read = request.user.has_perm("outbox_app.view_query_process")
    unseen = _("not permitted to see")
    # Show each once: MySQL does not tell the table, so every table has the same transactions.
    rows: dict[str, Row] = {}
    for what, effect, found in kinds:
        for holder in found.transactions:
            who = _who(holder)
            age = unseen if holder.seconds is None else duration(holder.seconds)
            query = one_line(holder.query, 300) if may_read else _("hidden")
            rows.setdefault(who, (what, who, age, query, effect))
        if found.denied:
            rows.setdefault(unseen, (what, unseen, "", one_line(found.denied, 200), ""))
    return rows.values()


def _effect(table: str) -> str:
    if table == StagedJob._meta.db_table:
        return _("Its jobs leave when it commits; other jobs do not wait.")
    return _("Its events are read when it commits; other events do not wait.")


def _who(holder: LongTransaction) -> str:
    kind = _("prepared transaction") if holder.prepared else _("session")
    user = one_line(holder.user, 80) or "?"
    return f"{kind} {one_line(holder.id, 80)}, {user}, {one_line(holder.state, 40)}"
