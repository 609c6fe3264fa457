"""The event log beside a plain keyset loop, and beside pyeventsourcing. PostgreSQL, in turns.

The readers are those of ``readers``. The writers are eight processes; each appends one event per
transaction, followed by five milliseconds of other work in it. *Free* writers insert the same rows
without a head. At the end ``losses`` runs for some seconds with the subscription alone: the events
that it has lost, duplicated or inverted are part of the result.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any
from uuid import UUID, uuid4

import django

from . import losses, readers, rival
from .writers import DATA, insert

ASKED = {
    "subscription_vs_keyset_loop": "at least 0.85",
    "subscription_vs_eventsourcing": "at least 0.45",
    "partitions_32_vs_1": "at least 0.8",
    "partitions_32_vs_4_in_4_processes": "at least 0.8",
    "projection_vs_keyset_loop": "at least 0.35",
    "writers_vs_free": "at least 0.9",
    "writers_vs_eventsourcing": "at least 5",
    "lost": "0",
    "duplicated": "0",
    "inverted": "0",
}
PAGE = 500
STREAMS = 1_000
WRITERS = 8
#: Seconds of other work in each writer's transaction.
WORK = 0.005

NOTE = "a customer's order"

Round = dict[str, float]


def run(*, quick: bool) -> dict[str, Any]:
    """Run the rounds.

    Returns:
        ``ratios`` (medians over the rounds), ``asked``, ``rounds`` of the readers and
        ``in_4_processes`` (events per second each), ``writers`` (transactions per second),
        ``lost``, ``duplicated`` and ``inverted``.
    """
    django.setup()
    # Many short rounds: on a shared machine the median of a few long ones depends on chance.
    events, rounds, seconds = (30_000, 5, 0.5) if quick else (50_000, 25, 1.0)
    with losses.scratch_database():
        rival.create_tables()
        wrote = write_in_turns(rounds, seconds)
        read = read_in_turns(rounds, events)
        shared = share_in_turns(min(rounds, 9), events)
        verdict = losses.contest([(2_000, 2)], {"window": [losses.subscription("window")] * 2})
    exact = {
        name: verdict["readers"]["window"][name] for name in ("lost", "duplicated", "inverted")
    }
    return {
        "ratios": {**_ratios(read, wrote, shared), **exact},
        "asked": ASKED,
        **exact,
        "rounds": read,
        "writers": wrote,
        "in_4_processes": shared,
        "exact": {key: verdict[key] for key in ("written", "readers")},
    }


def read_in_turns(rounds: int, events: int) -> list[Round]:
    """Measure every reader in each round, on a log of so many events."""
    fill(events)
    store = rival.datastore()
    state = json.dumps(json.loads(DATA.replace("''", "'"))).encode()
    aggregate = uuid4()
    for first in range(1, events + 1, PAGE):  # one call for tens of thousands never returns
        versions = range(first, first + PAGE)
        rival.recorder(store).insert_events(rival.stored(aggregate, versions, state))
    contestants: dict[str, Callable[[], int]] = {
        "keyset": lambda: readers.keyset(PAGE),
        "subscription": lambda: readers.subscription(1),
        "looking": lambda: readers.subscription(1, looks=True),
        "partitions_4": lambda: readers.subscription(4),
        "partitions_32": lambda: readers.subscription(32),
        "projection": readers.projection,
        "eventsourcing": lambda: rival.read(store, page=PAGE),
    }
    measured = []
    for number in range(rounds):
        turn = {name: readers.per_second(events, each) for name, each in contestants.items()}
        measured.append(turn)
        ratio = turn["subscription"] / turn["keyset"]
        print(
            f"readers {number + 1}/{rounds}: subscription {ratio:.2f} x keyset loop "
            f"({turn['subscription']:.0f} events/s)",
            flush=True,
        )
    store.close()
    return measured


def share_in_turns(rounds: int, events: int) -> list[Round]:
    """Measure four processes in each round, with eight partitions each and with one each."""
    measured = []
    for number in range(rounds):
        turn = {f"partitions_{n}": readers.in_processes(n, events) for n in (32, 4)}
        measured.append(turn)
        print(
            f"four processes {number + 1}/{rounds}: 32 partitions "
            f"{turn['partitions_32'] / turn['partitions_4']:.2f} x 4",
            flush=True,
        )
    return measured


def fill(events: int) -> None:
    """Write a log of so many events."""
    from django.db import connection, transaction

    from outbox_app.events.models import Event

    with connection.cursor() as cursor:
        cursor.execute(f"TRUNCATE TABLE {Event._meta.db_table}, {', '.join(_OF_WRITERS)}")
    for start in range(0, events, PAGE):
        streams = [f"order-{n % STREAMS}" for n in range(start, start + PAGE)]
        with transaction.atomic():
            insert(streams, PAGE, log=Event)
    with connection.cursor() as cursor:
        cursor.execute("ANALYZE")  # as autovacuum does within a minute


#: The other tables with rows of the writers.
_OF_WRITERS = ("outbox_stream", "rival_events")


def write_in_turns(rounds: int, seconds: float) -> list[Round]:
    """Measure eight parallel writers of each kind in each round."""
    from django.db import connections

    connections.close_all()
    context = get_context("fork")
    start = context.Barrier(WRITERS)
    with ProcessPoolExecutor(WRITERS, context, initializer=_begin, initargs=(start,)) as pool:
        measured: list[Round] = []
        for number in range(-1, rounds):  # round -1 warms up
            turn = {}
            for name in ("publish", "free", "eventsourcing"):
                jobs = [pool.submit(_write, name, seconds) for _ in range(WRITERS)]
                turn[name] = sum(job.result() for job in jobs) / seconds
            if number < 0:
                continue
            measured.append(turn)
            print(
                f"writers {number + 1}/{rounds}: {turn['publish'] / turn['eventsourcing']:.1f} x "
                f"pyeventsourcing ({turn['publish']:.0f} transactions/s)",
                flush=True,
            )
    return measured


_of_process: dict[str, Any] = {}


def _begin(start: Any) -> None:
    _of_process["start"] = start
    store = rival.datastore()
    _of_process["recorder"] = rival.recorder(store, work=WORK)


def _write(name: str, seconds: float) -> int:
    """Append events in a loop. Returns how many transactions were committed in time."""
    append = {"publish": _publish, "free": _insert, "eventsourcing": _append}[name]
    aggregate, count = uuid4(), 0
    _of_process["start"].wait()
    end = time.monotonic() + seconds
    while True:
        append(aggregate, count + 1)
        if time.monotonic() > end:
            return count
        count += 1


def _publish(aggregate: UUID, version: int) -> None:
    from django.db import transaction

    from outbox_app.events import publish

    with transaction.atomic():
        publish(str(aggregate), "order.placed", {"number": version, "note": NOTE})
        time.sleep(WORK)


def _insert(aggregate: UUID, version: int) -> None:
    """Insert the row that ``publish`` would insert, without the head: the version is known."""
    from django.db import connection, transaction

    from outbox_app.events.log.newevent import slice_of
    from outbox_app.events.models import Event

    stream = f"free-{aggregate}"
    with transaction.atomic(), connection.cursor() as cursor:
        cursor.execute(
            f"INSERT INTO {Event._meta.db_table} (topic, stream, version, type, data, metadata, "
            "slice, message_id) VALUES ('', %s, %s, 'order.placed', %s, '{}', %s, %s) RETURNING id",
            [
                stream,
                version,
                json.dumps({"number": version, "note": NOTE}),
                slice_of(stream),
                uuid4(),
            ],
        )
        cursor.fetchone()
        time.sleep(WORK)


def _append(aggregate: UUID, version: int) -> None:
    state = json.dumps({"number": version, "note": NOTE}).encode()
    _of_process["recorder"].insert_events(rival.stored(aggregate, [version], state))


def _ratios(read: list[Round], wrote: list[Round], shared: list[Round]) -> dict[str, float]:
    def median(rounds: list[Round], a: str, b: str) -> float:
        return round(statistics.median(r[a] / r[b] for r in rounds), 4)

    return {
        "subscription_vs_keyset_loop": median(read, "subscription", "keyset"),
        "projection_vs_keyset_loop": median(read, "projection", "keyset"),
        "partitions_4_vs_1": median(read, "partitions_4", "subscription"),
        "partitions_32_vs_1": median(read, "partitions_32", "subscription"),
        "partitions_32_vs_4_in_4_processes": median(shared, "partitions_32", "partitions_4"),
        "looking_vs_keyset_loop": median(read, "looking", "keyset"),
        "subscription_vs_eventsourcing": median(read, "subscription", "eventsourcing"),
        "writers_vs_free": median(wrote, "publish", "free"),
        "writers_vs_eventsourcing": median(wrote, "publish", "eventsourcing"),
    }
