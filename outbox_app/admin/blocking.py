"""What blocks: transactions in flight, held snapshots, and subscriptions that stand still.

Which session, whose, for how long, and what it keeps from going on. The text of its query may hold
data of anybody: it takes a permission of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from django.http import HttpRequest
from django.utils.translation import gettext as _

from ..eventlog.long_transactions import LongTransaction, LongTransactions
from ..models import StagedJob
from ..text import one_line
from .durations import duration
from .masking import masked_line
from .verdict import Seen


@dataclass(frozen=True, slots=True)
class Blocker:
    """One thing that something waits for."""

    what: Any
    #: Session or prepared transaction, and its user.
    who: str
    age: str
    query: str
    effect: Any


def blocking(request: HttpRequest, seen: Seen) -> list[Blocker]:
    """Return what blocks, as far as this person may see it."""
    may_read = may_read_queries(request)
    rows: dict[str, Blocker] = {}
    for drainer in _drainers(seen):
        rows[f"{drainer.what} {drainer.who}"] = drainer
    for table, found in seen.in_flight.items():
        effect = (
            _("Its jobs leave when it commits; others do not wait.")
            if table == StagedJob._meta.db_table
            else _("Its events come when it commits; others do not wait.")
        )
        what = _("In flight on %(table)s") % {"table": table}
        # Once each: MySQL does not say on which table, so that each has the same ones.
        for row in _rows(found, what, effect, may_read):
            rows.setdefault(row.who, row)
    effect = _("Deleted rows stay in the tables: batches take longer.")
    for row in _rows(seen.snapshots, _("Held snapshot"), effect, may_read):
        rows.setdefault(row.who, row)
    return [*rows.values(), *_subscriptions(seen)]


def may_read_queries(request: HttpRequest) -> bool:
    """Say whether this person may see the queries of other sessions."""
    return request.user.has_perm("outbox_app.view_query_process")


def _drainers(seen: Seen) -> Iterator[Blocker]:
    for each in seen.drainers:
        if each.is_silent or each.drainer.trouble:
            yield Blocker(
                _("Drainer silent") if each.is_silent else _("Drainer in trouble"),
                one_line(each.drainer, 100),
                duration(each.silent_seconds) if each.is_silent else "-",
                masked_line(each.drainer.trouble, 200),
                _("The jobs of its shards wait."),
            )
    if not seen.drainers:
        yield Blocker(_("No drainer"), "", "-", "", _("All jobs wait."))


def _subscriptions(seen: Seen) -> Iterator[Blocker]:
    for each in seen.lags or ():
        if each.state in ("failing", "paused", "stopped"):
            yield Blocker(
                _("Subscription %(state)s") % {"state": each.state},
                one_line(each.name, 80),
                duration(each.oldest_seconds) if each.behind else "-",
                masked_line(each.error, 200),
                _("Its events wait, and are not pruned."),
            )


def _rows(found: LongTransactions, what: str, effect: str, may_read: bool) -> Iterator[Blocker]:
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
