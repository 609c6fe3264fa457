"""Readers of one finished log, from its beginning to its end, in one process or in four.

- ``keyset``: a loop of ``id > cursor``, which decodes the JSON of the same columns and stores its
  position in a transaction once per page; on a log that is being written it would lose rows
- ``subscription``: outbox_app, with a handler that does nothing; with 4 and 32 partitions, too
- ``looking``: the same, with a handler that reads the data, metadata and time of each event
- ``projection``: outbox_app, with a view that has a row for each stream
- ``eventsourcing``: see ``rival``
- ``in_processes``: a subscription with its partitions on four processes that begin together
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from itertools import count
from multiprocessing import get_context
from typing import Any

_numbers = count()
PROCESSES = 4
#: A short lease, so that the processes soon have their shares.
LEASE_SECONDS = 1.0


def per_second(events: int, read: Callable[[], int]) -> float:
    """Return events per second; raise RuntimeError unless all of them were read."""
    started = time.perf_counter()
    found = read()
    seconds = time.perf_counter() - started
    if found != events:
        raise RuntimeError(f"{found} of {events} events were read.")
    return events / seconds


def keyset(page: int) -> int:
    """Read in a loop of ``id > cursor``."""
    from django.db import connection, transaction

    from outbox_app.events.log.record import COLUMNS
    from outbox_app.events.models import Event

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
    """Run a new subscription with a handler that does nothing or, with ``looks``, reads events."""
    from outbox_app.events.subscriptions.subscriber import subscriber

    name = f"nothing-{next(_numbers)}"

    def handle(events: list[Any]) -> None:
        if looks:
            for event in events:
                _ = event.data, event.metadata, event.recorded_at

    subscriber(name, partitions=partitions)(handle)
    return run(name)


def projection() -> int:
    """Run a new projection."""
    from outbox_app.events.projections.projection import Projection

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


def in_processes(partitions: int, events: int) -> float:
    """Return events per second of four processes, which share the partitions before they begin."""
    from outbox_app.events.models import Subscription
    from outbox_app.models import Lease

    from . import losses

    name = f"shared-{next(_numbers)}"
    context = get_context("fork")
    start, left = context.Barrier(PROCESSES), context.Value("q", events)
    began, ended = context.Value("d"), context.Value("d")

    def read(stop: Any) -> None:
        from outbox_app.events.subscriptions.runner import Runner
        from outbox_app.events.subscriptions.subscriber import subscriber, subscriber_named

        first = True

        @subscriber(name, partitions=partitions)
        def handle(found: list[Any]) -> None:
            nonlocal first
            if first:
                first = False
                start.wait(60)
                began.value = time.monotonic()
            with left.get_lock():
                left.value -= len(found)
            ended.value = time.monotonic()

        runner = Runner([subscriber_named(name)], lease_seconds=LEASE_SECONDS)
        threading.Thread(target=lambda: (stop.wait(), runner.stop()), daemon=True).start()
        runner.run()

    row = Subscription.objects.create(name=name, partitions=partitions, paused=True)
    taken = Lease.objects.filter(resource=f"subscription:{name}", owner__isnull=False)
    share = [partitions // PROCESSES] * PROCESSES
    with losses.reading({name: [read] * PROCESSES}):
        _wait(lambda: list(Counter(taken.values_list("owner", flat=True)).values()) == share)
        row.paused = False
        row.save()
        _wait(lambda: left.value <= 0)
    if left.value:
        raise RuntimeError(f"{-left.value} events were read twice.")
    return events / (ended.value - began.value)


def _wait(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 120
    while not condition():
        if time.monotonic() > end:
            raise RuntimeError("The processes did not share the partitions, or did not read all.")
        time.sleep(0.05)


def run(name: str) -> int:
    """Run a subscription until nothing is left, as ``run_subscriptions --once`` does."""
    from outbox_app.events.subscriptions.runner import Runner
    from outbox_app.events.subscriptions.subscriber import subscriber_named

    return Runner([subscriber_named(name)]).run(once=True)
