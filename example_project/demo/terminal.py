"""The demo's output on the terminal: a line of progress, and the table at the end."""

import sys
import time

from outbox_app.models import Incident


class Progress:
    """A progress bar: redrawn on a terminal, else a plain line every five seconds."""

    WIDTH = 30
    INTERVAL = 5.0

    def __init__(self, out=sys.stdout):
        self._out = out
        self._redraws = out.isatty()
        self._started = time.monotonic()
        self._last = float("-inf")

    def show(self, done, total, text):
        """Show how much is done."""
        now = time.monotonic()
        if not self._redraws and now - self._last < self.INTERVAL:
            return
        self._last = now
        filled = round(self.WIDTH * min(done, total) / total) if total else 0
        bar = "#" * filled + "." * (self.WIDTH - filled)
        line = f"{now - self._started:5.1f} s [{bar}] {text}"
        self._out.write(f"\r\x1b[2K{line}" if self._redraws else f"{line}\n")
        self._out.flush()

    def say(self, text):
        """Write a line that the bar does not overwrite."""
        start = "\r\x1b[2K" if self._redraws else ""
        self._out.write(f"{start}{time.monotonic() - self._started:5.1f} s {text}\n")
        self._out.flush()


def table(count):
    """Return the result as text."""
    explained = len(count.duplicated) - len(count.unexplained)
    rows = [
        ("", "orders", "tasks", ""),
        ("committed", len(count.committed), len(count.expected), ""),
        ("rolled back", len(count.rolled_back), "", f"{count.by_savepoint} of them by a savepoint"),
        ("executed", count.orders_done(), len(count.executed), ""),
        ("emptied", "", count.purged, "messages that the broker has lost"),
        ("lost", _orders(count.unfinished), len(count.lost), ""),
        ("leaked", len(count.leaked), len(count.leaked), ""),
        (
            "duplicated",
            _orders(count.duplicated),
            len(count.duplicated),
            f"{explained:,} of them explained by an incident" if count.duplicated else "",
        ),
    ]
    if count.unknown:
        rows.append(("unknown", len(count.unknown), "", "the connection broke at COMMIT"))
    lines = [f"{a:12}{_number(b):>10}{_number(c):>10}   {d}".rstrip() for a, b, c, d in rows]
    lines.append(
        f"Articles reserved by orders: {count.reserved:,}, taken from the stock: {count.taken:,}"
    )
    lines += [
        f"View {view.name}: {view.right:,} rows right, {view.wrong:,} wrong, against the orders"
        for view in count.views
    ]
    again = [each for each in count.incidents if each.kind == Incident.Kind.NO_RECEIPT]
    lines += [f"Incident: {incident_words(each)}" for each in count.incidents if each not in again]
    if again:
        lines.append(f"{len(again)} incidents: {again[0].get_kind_display()}")
    lines.append(
        "Lost and leaked: the writers' own ledgers against the worker's own notes. The outbox is "
        "not asked."
    )
    return "\n".join(lines)


def _orders(runs):
    return len({order for order, _ in runs})


def _number(value):
    return f"{value:,}" if isinstance(value, int) else value


def incident_words(incident):
    """Return an incident in one line."""
    drainer = f", drainer {incident.drainer}" if incident.drainer else ""
    return (
        f"{incident.get_kind_display()}, {len(incident.shards)} shards, "
        f"rows {incident.first_id} to {incident.last_id}{drainer}"
    )
