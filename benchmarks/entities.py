"""Commands to entities: to a hot one, to an idle one, to ten thousand; beside code by hand.

Each caller waits for its answer before it asks again. Contestants take turns in one run. The
databases write to disk at each commit (``fsync``, ``synchronous_commit``), which is their default.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any
from uuid import uuid4

import django

from .losses import scratch_database

ASKED = {
    "hot_vs_one_by_one": "at least 20 (MariaDB 10)",
    "hot_vs_select_for_update": "at least 15",
    "idle_vs_direct": "at least 0.75",
    "many_vs_single": "at least 0.9",
    "statements_per_command": "at most 0.02",
    "hot_1m_vs_1k": "at least 0.9",
}
TASKS = 2_000
THREADS = 32
ENTITIES = 10_000
#: Makes the command ids of one run unique.
_numbers = count()


def run(*, quick: bool, scale: float = 1.0) -> dict[str, Any]:
    """Run the rounds.

    Args:
        quick: Fewer and shorter rounds.
        scale: Fraction of the time, of the entities and of the long history, in a single round.

    Returns:
        ``ratios`` (medians over the rounds), ``asked``, and ``rounds``: commands per second of each
        contestant, with seconds from call to answer at the hot entity (``p50``, ``p99``).
    """
    django.setup()
    seconds, rounds, versions = (2.0, 3, 100_000) if quick else (5.0, 7, 1_000_000)
    if scale < 1:
        rounds = 1
    found = []
    with scratch_database():
        prepare(int(versions * scale), max(1, int(ENTITIES * scale)))
        for number in range(rounds):  # in alternating order: a contestant may affect the next
            order = list(CONTESTS)[:: -1 if number % 2 else 1]
            found.append({})
            for name in order:
                clean_up()
                found[-1][name] = CONTESTS[name](seconds * scale)
        statements = count_statements(seconds * scale)
    ratios = {
        "hot_vs_one_by_one": median(found, lambda r: best(r) / r["one_by_one"]["per_second"]),
        "hot_vs_select_for_update": median(found, lambda r: best(r) / r["by_hand"]["per_second"]),
        "idle_vs_direct": median(
            found,
            lambda r: (
                min(r["idle"]["per_second"], r["idle_async"]["per_second"])
                / r["direct"]["per_second"]
            ),
        ),
        "many_vs_single": median(
            found, lambda r: r["many"]["per_second"] / r["many_single"]["per_second"]
        ),
        "statements_per_command": statements,
        "hot_1m_vs_1k": median(found, lambda r: r["hot_1m"]["per_second"] / r["hot"]["per_second"]),
    }
    return {"ratios": ratios, "asked": ASKED, "rounds": found}


def clean_up() -> None:
    """Vacuum, so that autovacuum does not clean up one contestant's rows at another's expense."""
    from django.db import connection

    from .models import Hot, Hotter, Row

    if connection.vendor == "postgresql":
        tables = [each._meta.db_table for each in (Hot, Hotter, Row)] + ["outbox_stream"]
        tables += [each.versions._meta.db_table for each in (Hot, Hotter)]
        with connection.cursor() as cursor:
            cursor.execute(f"VACUUM ANALYZE {', '.join(tables)}")
        connection.close()


def median(rounds: list[Any], ratio: Callable[[Any], float]) -> float:
    return statistics.median(map(ratio, rounds))


def best(round: Any) -> float:
    """Return the rate of the hot entity's faster handler."""
    return max(round["hot"]["per_second"], round["hot_batch"]["per_second"])


def prepare(versions: int, entities: int) -> None:
    """Open the entities, and give one of them a long history."""
    global ENTITIES
    ENTITIES = entities
    from django.db import connection

    from outbox_app.entities import Command

    from .models import Hot, Hotter, Row

    for entity in (Hot, Hotter):
        entity.execute("hot", "open", command_id="open")
    for id in ("long", "idle"):
        Hot.execute(id, "open", command_id="open")
    Hot.execute_many(
        [Command(f"e{n}", "open", command_id="open") for n in range(ENTITIES)], timeout=3600
    )
    Row.objects.create(pk="hot", state={"count": 0, "text": "x" * 180})
    add = [Command("long", "add", {"amount": 1}, command_id=f"c{n}") for n in range(1000)]
    Hot.execute_many(add, timeout=600)
    for start in range(1000, versions, 1000):
        add = [
            Command("long", "add", {"amount": 1}, command_id=f"c{n}")
            for n in range(start, start + 1000)
        ]
        Hot.execute_many(add, timeout=600)
    with connection.cursor() as cursor:
        tables = "outbox_stream", Hot._meta.db_table, Hot.versions._meta.db_table
        analyze = "ANALYZE TABLE" if connection.vendor == "mysql" else "ANALYZE"
        for table in tables:
            cursor.execute(f"{analyze} {table}")
    connection.close()


def awaited(entity: str, id: Callable[[int], str], seconds: float) -> dict[str, float]:
    """Let 2,000 coroutines of one event loop call the entity, each waiting for its answers."""
    from . import models

    kind: Any = getattr(models, entity)
    took: list[float] = []

    async def ask(number: int, end: float) -> None:
        asked = False
        while (began := time.perf_counter()) < end or not asked:
            asked = True
            name = f"t{next(_numbers)}"
            await kind.aexecute(id(number), "add", {"amount": 1}, command_id=name, timeout=60)
            took.append(time.perf_counter() - began)

    async def all_tasks() -> float:
        begin = time.perf_counter()
        await asyncio.gather(*(ask(number, begin + seconds) for number in range(TASKS)))
        return time.perf_counter() - begin

    lasted = asyncio.run(all_tasks())
    cuts = statistics.quantiles(took, n=100)
    count = len(took)
    return {"per_second": count / lasted, "count": count, "p50": cuts[49], "p99": cuts[98]}


def threaded(ask: Callable[[str, int], Any], seconds: float, threads: int) -> dict[str, float]:
    """Let threads call ``ask``, each waiting for its answers."""
    from django.db import connections

    begin = time.perf_counter()

    def work(number: int) -> int:
        done = 0
        try:
            while not done or time.perf_counter() < begin + seconds:
                ask(f"t{next(_numbers)}", number)
                done += 1
        finally:
            connections.close_all()
        return done

    with ThreadPoolExecutor(threads) as pool:
        done = sum(pool.map(work, range(threads)))
    return {"per_second": done / (time.perf_counter() - begin)}


def add(command_id: str, id: str) -> None:
    from .models import Hot

    Hot.execute(id, "add", {"amount": 1}, command_id=command_id, timeout=60)


def one_by_one(seconds: float) -> dict[str, float]:
    with no_batches():
        return threaded(lambda name, _: add(name, "hot"), seconds, THREADS)


def many_single(seconds: float) -> dict[str, float]:
    with no_batches():
        return threaded(lambda name, _: add(name, some_entity()), seconds, THREADS)


@contextmanager
def no_batches() -> Any:
    from .models import Hot

    Hot.batch_size = 1
    try:
        yield
    finally:
        del Hot.batch_size


def by_hand(seconds: float) -> dict[str, float]:
    """Do what teams write by hand: lock the row, and store the id in a unique column."""
    from django.db import transaction

    from .models import Row, RowCommand

    def ask(command_id: str, _: int) -> None:
        with transaction.atomic():
            row = Row.objects.select_for_update().get(pk="hot")
            known = RowCommand.objects.filter(row="hot", command_id=command_id).first()
            if known is None:
                row.state["count"] += 1
                row.save(update_fields=["state"])
                RowCommand.objects.create(
                    row="hot",
                    command_id=command_id,
                    request={"amount": 1},
                    response=row.state["count"],
                )

    return threaded(ask, seconds, THREADS)


def idle_async(seconds: float) -> dict[str, float]:
    from .models import Hot

    async def ask() -> int:
        done = 0
        end = time.perf_counter() + seconds
        while not done or time.perf_counter() < end:
            await Hot.aexecute("idle", "add", {"amount": 1}, command_id=f"t{next(_numbers)}")
            done += 1
        return done

    begin = time.perf_counter()
    done = asyncio.run(ask())
    return {"per_second": done / (time.perf_counter() - begin)}


def direct(seconds: float) -> dict[str, float]:
    """Execute the statements of one command by hand, on one connection."""
    from django.db import connection, transaction

    from .models import Hot, HotVersion

    versions, rows = HotVersion._meta.db_table, Hot._meta.db_table

    def ask(command_id: str, _: int) -> None:
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(f"SELECT version, state, changed_at FROM {rows} WHERE id = %s", ["idle"])
            version, state, _now = cursor.fetchone()
            cursor.execute(
                f"SELECT command_id FROM {versions} WHERE stream = %s AND command_id = %s",
                ["idle", command_id],
            )
            cursor.fetchall()
            state = json.loads(state)
            state["count"] += 1
            text = json.dumps(state)
            cursor.execute(
                "UPDATE outbox_stream SET version = version + 1 "
                "WHERE log = %s AND stream = %s AND version = %s",
                [versions, "idle", version],
            )
            cursor.execute(
                f"UPDATE {rows} SET version = version + 1, state = %s, changed_at = NOW() "
                "WHERE id = %s AND version = %s",
                [text, "idle", version],
            )
            id = uuid4()
            cursor.execute(
                f"INSERT INTO {versions} (topic, stream, version, type, data, metadata, slice, "
                "message_id, command_id, command, request_hash, rejected, response, state) "
                "VALUES ('', 'idle', %s, 'hot.add', %s, '{}', 1, %s, %s, 'add', %s, false, %s, %s)",
                [
                    version + 1,
                    '{"amount": 1}',
                    id.hex if connection.vendor == "mysql" else str(id),
                    command_id,
                    "0" * 64,
                    str(state["count"]),
                    text,
                ],
            )

    return threaded(ask, seconds, 1)


def some_entity() -> str:
    return f"e{next(_numbers) * 7919 % ENTITIES}"


def count_statements(seconds: float) -> float:
    """Return the statements per command of the hot entity, with batches as they form."""
    from django.db.backends.utils import CursorWrapper

    sent = 0
    original = CursorWrapper.execute

    def note(self: Any, sql: Any, params: Any = None) -> Any:
        nonlocal sent
        sent += 1
        return original(self, sql, params)

    CursorWrapper.execute = note  # type: ignore[method-assign]
    try:
        found = awaited("Hot", lambda _: "hot", seconds)
    finally:
        CursorWrapper.execute = original  # type: ignore[method-assign]
    return sent / found["count"]


CONTESTS: dict[str, Callable[[float], dict[str, float]]] = {
    "hot": lambda seconds: awaited("Hot", lambda _: "hot", seconds),
    "hot_batch": lambda seconds: awaited("Hotter", lambda _: "hot", seconds),
    "hot_1m": lambda seconds: awaited("Hot", lambda _: "long", seconds),
    "one_by_one": one_by_one,
    "by_hand": by_hand,
    "idle": lambda seconds: threaded(lambda name, _: add(name, "idle"), seconds, 1),
    "idle_async": idle_async,
    "direct": direct,
    "many": lambda seconds: threaded(lambda name, _: add(name, some_entity()), seconds, THREADS),
    "many_single": many_single,
}
