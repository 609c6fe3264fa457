"""Compares the writers' ledgers with the worker's notes, without asking the outbox.

The judge of ``outbox_app.history`` compares: a task of a committed order is *lost* if it never ran,
and *leaked* if its order is not in the table of orders. A task is *duplicated* if it succeeded more
than once; the judge says which of these no incident explains. However often a task ran, its effects
must be there once: the pieces taken from the stock are those that the orders reserved. A row of a
view is *right* if it agrees with the shop's tables, else *wrong*.
"""

from collections import Counter
from dataclasses import dataclass
from datetime import datetime

from django.db.models import Count as Number
from django.db.models import Sum
from django.utils import timezone

from example_project.shop.models import ArticleSales, Execution, Order, OrderProgress, Shelf, Stock
from outbox_app.history import Record, judge
from outbox_app.models import Incident

from .ledger import COMMITTED, ROLLED_BACK, UNKNOWN

#: The tasks of an order, each with the task whose outbox row led to it. The worker stages the row
#: of the receipt, the second step of a chain: the writer does not know it.
STAGED_AS = {
    "reserve_stock": "reserve_stock",
    "capture_payment": "capture_payment",
    "send_receipt": "capture_payment",
}


@dataclass(frozen=True)
class Start:
    """The highest ids, the stock and the time when the demo began."""

    execution: int
    incident: int
    on_hand: int
    time: datetime

    @classmethod
    def now(cls):
        return cls(
            last_id(Execution), last_id(Incident), total("on_hand", shelves()), timezone.now()
        )


def last_id(model):
    """Return the highest id of a table, 0 if it is empty."""
    return model.objects.order_by("-pk").values_list("pk", flat=True).first() or 0


def shelves():
    """Return the shelves of the articles, without the shelves of flash sales."""
    return Shelf.objects.filter(
        pk__in=[str(pk) for pk in Stock.objects.values_list("pk", flat=True)]
    )


def total(field, rows):
    """Return the sum of a column, 0 without rows."""
    return rows.aggregate(total=Sum(field, default=0))["total"]


@dataclass(frozen=True)
class View:
    """How many rows of a view agree with the shop's tables."""

    name: str
    right: int
    wrong: int


def compare_views():
    """Compare both views with the orders, row by row."""
    orders = Order.objects.order_by()
    sales = orders.values_list("stock").annotate(Sum("quantity"), Number("pk"))
    steps = orders.values_list("pk", "reserved_at", "payment", "receipt")
    return [
        _compare(
            "order-progress (pushed)",
            {pk: tuple(bool(step) for step in done) for pk, *done in steps},
            OrderProgress.objects.values_list("pk", "reserved", "paid", "receipt_sent"),
        ),
        _compare(
            "article-sales",
            {pk: (sold, number) for pk, sold, number in sales},
            ArticleSales.objects.values_list("pk", "sold", "orders"),
        ),
    ]


def _compare(name, expected, rows):
    found = {pk: tuple(values) for pk, *values in rows}
    keys = expected.keys() | found.keys()
    right = sum(expected.get(key) == found.get(key) for key in keys)
    return View(name, right, len(keys) - right)


class Count:
    """The two accounts of one run, side by side."""

    def __init__(self, entries, start, purged):
        self.purged = purged
        by_outcome = {outcome: [] for outcome in (COMMITTED, ROLLED_BACK, UNKNOWN)}
        for entry in entries:
            by_outcome[entry.outcome].append(entry)
        self.committed = {entry.order: entry for entry in by_outcome[COMMITTED]}
        self.rolled_back = {entry.order: entry for entry in by_outcome[ROLLED_BACK]}
        self.unknown = {entry.order: entry for entry in by_outcome[UNKNOWN]}
        self.by_savepoint = sum(entry.by_savepoint for entry in entries)

        runs = Execution.objects.filter(pk__gt=start.execution, task__in=STAGED_AS)
        self.runs = list(runs.values_list("subject", "task", "state"))
        self.taken = start.on_hand - total("on_hand", shelves())
        self.reserved = total("quantity", Order.objects.filter(reserved_at__gte=start.time))
        self.views = compare_views()
        self.incidents = list(Incident.objects.filter(pk__gt=start.incident))

        self.expected = {(order, task) for order in self.committed for task in STAGED_AS}
        succeeded = Counter((order, task) for order, task, state in self.runs if state == "SUCCESS")
        self.executed = self.expected & succeeded.keys()
        self.duplicated = {run: times - 1 for run, times in succeeded.items() if times > 1}
        # A batch that is one pipeline may be sent again one by one.
        self.verdict = judge(
            self._history(entries, succeeded),
            promises=("P1", "P2", "P3", "P5"),
            sends_of_an_attempt=2,
        )

    @property
    def unfinished(self):
        return self.expected - self.executed

    @property
    def lost(self):
        return self.verdict.findings.get("P3", [])

    @property
    def leaked(self):
        return [text for name in ("P1", "P2") for text in self.verdict.findings.get(name, [])]

    @property
    def unexplained(self):
        return self.verdict.findings.get("P5", [])

    @property
    def finished(self):
        """Whether each task of each committed order has succeeded."""
        return not self.unfinished

    @property
    def passed(self):
        right = not any(view.wrong for view in self.views) and self.taken == self.reserved
        return self.verdict.holds and self.finished and right

    def orders_done(self):
        """Return the number of committed orders with all the rows that their tasks write."""
        done = Order.objects.exclude(reserved_at=None).exclude(payment=None).exclude(receipt=None)
        return len(self.committed.keys() & {str(pk) for pk in done.values_list("pk", flat=True)})

    def _history(self, entries, succeeded):
        outcomes = {COMMITTED: "ok", ROLLED_BACK: "failed", UNKNOWN: "unknown"}
        for entry in entries:
            yield Record("transaction", {"id": entry.order}, outcome=outcomes[entry.outcome])
            for task, staged_as in STAGED_AS.items():
                facts = {"job": (entry.order, task), "transaction": entry.order}
                yield Record("stage", {**facts, **entry.staged[staged_as]})
        stored = {str(pk) for pk in Order.objects.values_list("pk", flat=True)}
        yield from (Record("commit", {"transaction": order}) for order in stored)
        # What ran was published, also if it has failed. An earlier run of the demo left orders.
        earlier = stored - {entry.order for entry in entries}
        for run in {(order, task) for order, task, _ in self.runs if order not in earlier}:
            yield from [Record("publish", {"job": run})] * max(1, succeeded[run])
        for each in self.incidents:
            facts = {"kind": each.kind, "shards": each.shards}
            yield Record("incident", {**facts, "first": each.first_id, "last": each.last_id})
