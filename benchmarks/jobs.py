"""Jobs for the benchmarks: about 200 bytes of arguments, staged once and copied for each round.

Each round begins with the same rows on every database, without staging them again: one INSERT …
SELECT copies them from a separate table, in the order in which they were staged.
"""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import django

#: The alias in the settings for each name in the results.
ALIASES = {"postgres": "default", "mariadb": "mariadb", "sqlite": "sqlite"}
COPY, KEYED = "benchmark_jobs", "benchmark_keyed"
#: The number of ordering keys in ``KEYED``. A batch has several jobs of each key.
KEYS = 500
NOTE = "a customer's order of two lines, to be sent on Monday to the address of the customer"

Round = dict[str, float]


def prepare(*aliases: str, broker: str = "REDIS_URL") -> Any:
    """Create the tables of these aliases. Returns a Celery app that stages."""
    django.setup()
    from django.core.management import call_command

    from outbox_app.celery import OutboxCelery

    for alias in aliases:
        call_command("migrate", database=alias, verbosity=0)
        execute(f"DELETE FROM {_table()}", using=alias)
    return OutboxCelery("benchmark", broker=os.environ[broker], set_as_current=False)


def part(scale: float, jobs: int, rounds: int) -> tuple[int, int]:
    """Return the jobs of a round, in hundreds, and the rounds: one if ``scale`` is below 1."""
    return max(200, int(jobs * scale) // 100 * 100), rounds if scale >= 1 else 1


def task(app: Any) -> Any:
    """Return the task of the benchmarks."""

    return app.task(name="benchmarks.place", ignore_result=True)(_place)


def _place(number: int, **order: Any) -> None: ...


def order(number: int) -> dict[str, Any]:
    """Return keyword arguments of the usual length."""
    return {
        "customer": 7_000_000 + number,
        "note": NOTE,
        "skus": ["a-1700", "b-4200"],
        "paid": True,
    }


def keep(app: Any, jobs: int, *, using: str, table: str = COPY) -> None:
    """Stage jobs (with ordering keys if ``table`` is KEYED), and keep their rows in a table."""
    from django.db import transaction

    from outbox_app import stage_many

    place = task(app)
    calls = (place.s(number, **order(number)) for number in range(jobs))
    if table == KEYED:
        calls = (call.set(ordering_key=f"key-{n % KEYS}") for n, call in enumerate(calls))
    with transaction.atomic(using=using):
        stage_many(calls, using=using)
    execute(f"DROP TABLE IF EXISTS {table}", using=using)
    execute(f"CREATE TABLE {table} AS SELECT * FROM {_table()}", using=using)
    execute(f"DELETE FROM {_table()}", using=using)


def copy(jobs: int, *, using: str = "default", table: str = COPY, empty: bool = True) -> None:
    """Commit copies of the first kept jobs. On PostgreSQL ``empty`` truncates the outbox first."""
    from outbox_app.models import StagedJob

    names = [f.column for f in StagedJob._meta.concrete_fields if f.name not in ("id", "staged_at")]
    columns = ", ".join(names)
    if empty and connection_of(using).vendor == "postgresql":
        execute(f"TRUNCATE {_table()}", using=using)
    if not jobs:  # the table of kept jobs may not exist
        return
    rows = f"SELECT {columns} FROM {table} ORDER BY id LIMIT {jobs}"
    execute(f"INSERT INTO {_table()} ({columns}) {rows}", using=using)


def count(*, using: str = "default") -> int:
    """Return how many jobs are in the outbox."""
    return int(execute(f"SELECT count(*) FROM {_table()}", using=using)[0][0])


def execute(sql: str, *, using: str = "default") -> Any:
    """Execute a statement. Returns its rows."""
    with connection_of(using).cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchall() if cursor.description else []


def connection_of(using: str) -> Any:
    """Return the connection of an alias."""
    from django.db import connections

    return connections[using]


@cache
def redis() -> Any:
    """Return a client of the broker."""
    from redis import Redis

    return Redis.from_url(os.environ["REDIS_URL"])


@contextmanager
def emptied(*, expect: int) -> Iterator[None]:
    """Empty the broker first; raise RuntimeError unless it has all messages at the end."""
    redis().flushdb()
    yield
    arrived = redis().llen("celery")
    if arrived != expect:
        raise RuntimeError(f"{expect} messages were sent, {arrived} arrived")


def arrived_ids() -> list[str]:
    """Return the task ids in the broker, in the order in which it accepted them."""
    return [json.loads(each)["headers"]["id"] for each in reversed(redis().lrange("celery", 0, -1))]


def wait_for(condition: Callable[[], Any], *, seconds: float = 120.0) -> None:
    """Wait until a condition holds, polling every 5 ms.

    Raises:
        RuntimeError: It does not hold in time.
    """
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            raise RuntimeError("What the benchmark waits for does not happen")
        time.sleep(0.005)


def per_second(jobs: int, work: Callable[[], Any]) -> float:
    """Return the jobs per second of ``work``."""
    started = time.perf_counter()
    work()
    return jobs / (time.perf_counter() - started)


def median(rounds: list[Round], ours: str, others: str) -> float:
    """Return the median of the ratio ``ours`` to ``others`` over the rounds."""
    return round(statistics.median(each[ours] / each[others] for each in rounds), 4)


def _table() -> str:
    from outbox_app.models import StagedJob

    return str(StagedJob._meta.db_table)
