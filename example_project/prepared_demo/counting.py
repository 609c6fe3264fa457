"""Compares the two databases: the committed payments with the published events."""

import sqlite3
from collections import Counter

from django.conf import settings

from outbox_app.events.models import Event
from outbox_app.prepared.models import PreparedEvent


def open_events():
    """Return the number of events that are neither confirmed nor cancelled."""
    return PreparedEvent.objects.open().count()


def committed():
    """Return the orders that were paid, according to the database of the payments."""
    database = sqlite3.connect(settings.DATA_DIR / "payments.sqlite3")
    try:
        return [order for (order,) in database.execute('SELECT "order" FROM payments_payment')]
    finally:
        database.close()


class Count:
    """The results of the payments.

    Args:
        orders: How the payment of each order ended, by the id of the order.
    """

    def __init__(self, orders):
        self.orders = orders
        self.committed = Counter(committed())
        self.published = Counter(Event.objects.values_list("stream", flat=True))
        self.prepared = {row.stream: row for row in PreparedEvent.objects.all()}

    @property
    def passed(self):
        """Whether each committed payment was published once, and nothing else was."""
        return self.published == self.committed and not open_events()

    def table(self):
        """Return the result as text."""
        lines = [
            f"{'':28}{'paid':>6}{'committed':>11}{'published':>11}{'cancelled':>11}   decided by"
        ]
        for name in [*dict.fromkeys(self.orders.values()), "all"]:
            orders = [order for order, ended in self.orders.items() if name in (ended, "all")]
            rows = [self.prepared[order] for order in orders if order in self.prepared]
            cancelled = sum(row.state == PreparedEvent.State.CANCELLED for row in rows)
            decided = Counter(row.decided_by or "nobody yet" for row in rows)
            words = ", ".join(f"{number} {by}" for by, number in sorted(decided.items()))
            committed = sum(self.committed[order] for order in orders)
            published = sum(self.published[order] for order in orders)
            lines.append(
                f"{name:28}{len(orders):>6}{committed:>11}{published:>11}{cancelled:>11}   {words}"
            )
        lost = (self.committed - self.published).total()
        leaked = (self.published - self.committed).total()
        lines.append(f"Lost: {lost}, leaked: {leaked}, undecided: {open_events()}")
        return "\n".join(lines)
