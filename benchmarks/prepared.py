"""Prepared events beside ``publish()``, the cost of the fence, and the check-back of many events.

The log and the business rows are in two databases of one server; over HTTP the keeper is another
process. Contestants take turns in one run. The databases write to disk at each commit (``fsync``,
``synchronous_commit``), which is their default.
"""

from __future__ import annotations

import json
import os
import secrets
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from typing import Any
from uuid import uuid4

import django

from .entities import median, threaded
from .losses import scratch_database

ASKED = {
    "prepared_vs_publish": "at least 0.25",
    "prepared_many_vs_one": "at least 5",
    "fence_cost": "at least 0.8",
    "check_100k_vs_1k": "at least 0.8",
}
SENDER = "billing"
THREADS = 4
#: Events that the check-back decides in a round.
DECIDED = 1_000
MANY = 100_000
#: A keeper's table with so many open events that deciding ``DECIDED`` of them makes no difference.
LARGE = "benchmark_prepared"
#: Makes the ids and values of one run unique.
_numbers = count()


def run(*, quick: bool, scale: float = 1.0) -> dict[str, Any]:
    """Run the rounds.

    Args:
        quick: Fewer and shorter rounds.
        scale: Fraction of the time and of the open events, in a single round.

    Returns:
        ``ratios`` (medians over the rounds), ``asked``, and ``rounds``: transactions per
        second of each contestant, or events per second.
    """
    port, peers = register_peers()
    django.setup()
    seconds, rounds = (1.0, 3) if quick else (5.0, 7)
    if scale < 1:
        rounds = 1
    found = []
    with ExitStack() as stack:
        stack.enter_context(scratch_database("default"))
        stack.enter_context(scratch_database(SENDER))
        prepare(int(MANY * scale))
        stack.enter_context(keeper_over_http(port, peers))
        for number in range(rounds):  # in alternating order: a contestant may affect the next
            order = list(CONTESTS)[:: -1 if number % 2 else 1]
            found.append({name: CONTESTS[name](seconds * scale) for name in order})

    def ratio(name: str, to: str) -> float:
        return median(found, lambda r: r[name]["per_second"] / r[to]["per_second"])

    ratios = {
        "prepared_vs_publish": ratio("prepared", "publish"),
        "prepared_many_vs_one": ratio("http_100", "http_1"),
        "fence_cost": ratio("fenced", "unfenced"),
        "check_100k_vs_1k": ratio("check_100k", "check_1k"),
    }
    return {"ratios": ratios, "asked": ASKED, "rounds": found}


def prepare(open_events: int) -> None:
    """Create the table with many open events, and the rows that the transactions change."""
    from django.db import connection

    from outbox_app.prepared.models import PreparedEvent

    from .models import Row

    for alias in ("default", SENDER):
        rows = [Row(pk=f"row-{n}", state={"count": 0}) for n in range(1_000)]
        Row.objects.using(alias).bulk_create(rows)
    plant(DECIDED)
    table = PreparedEvent._meta.db_table
    columns = [f.column for f in PreparedEvent._meta.fields if f.column not in ("id", "event_id")]
    names = ", ".join(columns)
    mysql = connection.vendor == "mysql"
    uuid = "REPLACE(UUID(), '-', '')" if mysql else "gen_random_uuid()"
    copies = -(-open_events // DECIDED)
    with connection.cursor() as cursor:
        like = f"LIKE {table}" if mysql else f"(LIKE {table} INCLUDING ALL)"
        cursor.execute(f"CREATE TABLE {LARGE} {like}")
        for _ in range(copies):
            cursor.execute(
                f"INSERT INTO {LARGE} (event_id, {names}) SELECT {uuid}, {names} FROM {table}"
            )
        cursor.execute(f"DELETE FROM {table}")
        analyze = "ANALYZE TABLE" if mysql else "ANALYZE"
        for each in (LARGE, table):
            cursor.execute(f"{analyze} {each}")
            cursor.fetchall() if mysql else None


def plant(events: int) -> None:
    """Prepare events that are due for a check-back, without a confirm or a cancel."""
    from datetime import timedelta

    from outbox_app.database.clock import DatabaseNow
    from outbox_app.prepared import NewPrepared
    from outbox_app.prepared.models import PreparedEvent
    from outbox_app.prepared.request import checked

    rows = []
    for _ in range(events):
        new = NewPrepared(f"order-{next(_numbers)}", "order.paid", {"total": 30})
        row = checked(new)
        row.sender, row.decide_by = f"alias:{SENDER}", DatabaseNow() + timedelta(days=1)
        row.next_check_at = DatabaseNow()
        rows.append(row)
    PreparedEvent.objects.bulk_create(rows, 500)


def publishing(_: str, number: int) -> None:
    """Change the business row and publish its event in one transaction."""
    from django.db import transaction

    from outbox_app.events import publish

    with transaction.atomic():
        change_row("default", number)
        publish(f"order-{next(_numbers)}", "order.paid", {"total": 30})


def preparing(_: str, number: int) -> None:
    """Change the business row on one alias, with its event prepared on another."""
    from outbox_app.prepared import prepared

    with prepared(f"order-{next(_numbers)}", "order.paid", {"total": 30}, using=SENDER):
        change_row(SENDER, number)


def all_confirmed(seconds: float) -> dict[str, float]:
    """Prepare as fast as possible; the time includes the confirms that threads send afterwards."""
    from outbox_app.prepared import sender

    begin = time.perf_counter()
    found = threaded(preparing, seconds, THREADS)
    lasted = time.perf_counter() - begin
    sender.calls.drain(600)
    return {"per_second": found["per_second"] * lasted / (time.perf_counter() - begin)}


def register_peers() -> tuple[int, str]:
    """Make the keeper a peer of this process. Return its port, and the peers that it must have."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ["BENCHMARK_SECRET"] = secrets.token_hex(32)
    peer = {
        "address": f"http://127.0.0.1:{port}/outbox/",
        "keys": [{"id": "benchmark", "secret": "env:BENCHMARK_SECRET"}],
    }
    keeper = peer | {"direction": "keeper", "database": SENDER}
    os.environ["BENCHMARK_PEERS"] = json.dumps({"shop": keeper})
    return port, json.dumps({"sender": peer | {"direction": "sender", "types": ["*"]}})


@contextmanager
def keeper_over_http(port: int, peers: str) -> Iterator[None]:
    """Serve the keeper's door in another process."""
    from django.db import connection

    url = os.environ["BENCHMARK_URL"].rpartition("/")[0] + "/" + connection.settings_dict["NAME"]
    server = subprocess.Popen(
        [sys.executable, "-m", "django", "runserver", "--noreload", str(port)],
        env={**os.environ, "BENCHMARK_URL": url, "BENCHMARK_PEERS": peers},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while server.poll() is None:
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
                break
            time.sleep(0.1)
        yield
    finally:
        server.terminate()
        server.wait()


def over_http(events: int) -> Callable[[float], dict[str, float]]:
    """Return a contestant that prepares so many events per request."""

    def ask(_: str, number: int) -> None:
        from outbox_app.prepared import NewPrepared, prepare_many

        new = [
            NewPrepared(f"order-{next(_numbers)}", "order.paid", {"total": 30})
            for _ in range(events)
        ]
        prepare_many(new, using=SENDER, to="shop")

    def contest(seconds: float) -> dict[str, float]:
        from outbox_app.prepared.models import PreparedEvent

        found = threaded(ask, seconds, THREADS)
        PreparedEvent.objects.filter(sender="sender").delete()  # this sender cannot be asked
        return {"per_second": found["per_second"] * events}

    return contest


def change_row(alias: str, number: int) -> None:
    from .models import Row

    Row.objects.using(alias).filter(pk=f"row-{number}").update(state={"count": next(_numbers)})


def business(fenced: bool) -> Callable[[str, int], None]:
    """Return a transaction of five statements, with or without a fence."""

    def transact(_: str, number: int) -> None:
        from django.db import transaction
        from django.utils import timezone

        from outbox_app.prepared import fence
        from outbox_app.prepared.sender import Prepared

        from .models import Row, RowCommand

        with transaction.atomic(using=SENDER):
            if fenced:
                fence(Prepared(uuid4(), SENDER, "", None, timezone.now()))  # type: ignore[arg-type]
            row = Row.objects.using(SENDER).select_for_update().get(pk=f"row-{number}")
            change_row(SENDER, number)
            for _ in range(2):
                RowCommand.objects.using(SENDER).create(
                    row=row.pk, command_id=f"c{next(_numbers)}", request={}, response={}
                )
            RowCommand.objects.using(SENDER).filter(row=row.pk, command_id="c0").exists()

    return transact


@contextmanager
def large_table() -> Iterator[None]:
    """Exchange the keeper's table for the one with many open events."""
    from outbox_app.prepared.models import PreparedEvent

    table, aside = PreparedEvent._meta.db_table, f"{LARGE}_aside"
    rename((table, aside), (LARGE, table))
    try:
        yield
    finally:
        rename((table, LARGE), (aside, table))


def rename(*tables: tuple[str, str]) -> None:
    from django.db import connection

    with connection.cursor() as cursor:
        for name, new in tables:
            cursor.execute(f"ALTER TABLE {name} RENAME TO {new}")


def check(_: float) -> dict[str, float]:
    """Plant ``DECIDED`` events, create their fences, and time the check-back."""
    from outbox_app.prepared.checking_back import CheckBack
    from outbox_app.prepared.models import Fence, PreparedEvent

    plant(DECIDED)
    due = PreparedEvent.objects.due(f"alias:{SENDER}").values_list("event_id", flat=True)
    # More fences than ``DECIDED``: when the loop stops, questions about other events are open.
    ids = list(due[: DECIDED + 1_000])
    rows = [Fence(pk=id, outcome=Fence.Outcome.COMMITTED) for id in ids]
    Fence.objects.using(SENDER).bulk_create(rows, 500, ignore_conflicts=True)

    def stop(loop: CheckBack) -> None:
        if loop.done >= DECIDED:
            loop.stop()

    loop = CheckBack(using="default", on_turn=stop)
    begin = time.perf_counter()
    loop.run(once=True)
    # loop.done includes events that were in progress at the stop: their time is included, too.
    return {"per_second": loop.done / (time.perf_counter() - begin)}


def check_many(seconds: float) -> dict[str, float]:
    with large_table():
        return check(seconds)


CONTESTS: dict[str, Callable[[float], dict[str, float]]] = {
    "publish": lambda seconds: threaded(publishing, seconds, THREADS),
    "prepared": all_confirmed,
    "http_1": over_http(1),
    "http_100": over_http(100),
    "unfenced": lambda seconds: threaded(business(fenced=False), seconds, THREADS),
    "fenced": lambda seconds: threaded(business(fenced=True), seconds, THREADS),
    "check_1k": check,
    "check_100k": check_many,
}
