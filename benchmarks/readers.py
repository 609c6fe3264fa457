"""Readers of one finished log, from its beginning to its end, in one process.

- ``keyset``: what a loop of ``id > cursor`` costs that decodes the JSON of the same columns and
  stores its position once a page, in a transaction; it would lose rows of a log that is written to
- ``subscription``: the product, into a handler that does nothing; with 4 and 32 partitions too
- ``looking``: the same with a handler that looks at data, metadata and time of each event
- ``projection``: the product, into a view with a row for each stream
- ``eventsourcing``: see ``rival``
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from itertools import count
from typing import Any

_numbers = count()


def per_second(events: int, read: Callable[[], int]) -> float:
    """Return events per second; all of them must have been read."""
    started = time.perf_counter()
    found = read()
    seconds = time.perf_counter() - started
    if found != events:
        raise RuntimeError(f"{found} of {events} events were read.")
    return events / seconds


def keyset(page: int) -> int:
    """Read in a loop of ``id > cursor``."""
    from django.db import connection, transaction

    from outbox_app.eventlog.record import COLUMNS
    from outbox_app.models import Event

    from .models import Place

    sql = (
        f"SELECT {', '.join(COLUMNS)} FROM {Event._meta.db_table} WHERE id > %s "
        f"ORDER BY id LIMIT {page}"
    )
    data, metadata = COLUMNS.index("data"), COLUMNS.index("metadata")
    place = Place.objects.create(reader="keyset")
    handled = 0
    while True:
        with connection.cursor() as cursor:
            cursor.execute(sql, [place.position])
            rows = cursor.fetchall()
        if not rows:
            return handled
        for row in rows:
            json.loads(row[data])
            json.loads(row[metadata])
        handled += len(rows)
        place.position = rows[-1][0]
        with transaction.atomic():
            place.save(update_fields=["position"])


def subscription(partitions: int, *, looks: bool = False) -> int:
    """Run a new subscription into a handler that does nothing, or looks at what it is given."""
    from outbox_app.subscriptions.subscriber import subscriber

    name = f"nothing-{next(_numbers)}"

    def handle(events: list[Any]) -> None:
        if looks:
            for event in events:
                _ = event.data, event.metadata, event.recorded_at

    subscriber(name, partitions=partitions)(handle)
    return run(name)


def projection() -> int:
    """Run a new projection."""
    from outbox_app.projections.projection import Projection

    from .models import Stock

    name = f"stock-{next(_numbers)}"
    Stock.objects.all().delete()

    def apply(self: Any, event: Any, row: Any) -> Any:
        row = row or Stock()
        row.events += 1
        row.last = event.version
        return row

    type("StockView", (Projection,), {"name": name, "model": Stock, "apply": apply})
    return run(name)


def run(name: str) -> int:
    """Run a subscription until nothing is left, as ``run_subscriptions --once`` does."""
    from outbox_app.subscriptions.runner import Runner
    from outbox_app.subscriptions.subscriber import subscriber_named

    return Runner([subscriber_named(name)]).run(once=True)
