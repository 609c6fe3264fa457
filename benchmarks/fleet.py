"""The fleet: ids made without asking, beside ``uuid4``; commands that are passed on, and servers
that die (``routing``); split tables (``sharded``).

In turns in one process. ``ids_per_second`` of the rounds is that of four threads. Time is reserved,
and renewed, in the database as ever.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from threading import Barrier, Thread
from typing import Any
from uuid import uuid4

import django

from . import losses, routing, sharded

ASKED = {"ids_vs_uuid4": "at least 0.5", **routing.ASKED, **sharded.ASKED}
THREADS = 4


def run(*, scale: float = 1.0, quick: bool) -> dict[str, Any]:
    """Run the rounds.

    Args:
        scale: Of a million rows, in each table of ``sharded``.

    Returns:
        ``ratios`` (medians over the rounds), ``asked``, and ``rounds`` with ids per second: of one
        thread, of four, and of ``uuid4`` in either.
    """
    django.setup()
    from outbox_app.ids import snowflake, snowflakes

    count, rounds = (5_000, 7) if quick else (50_000, 25)
    measured = []
    with losses.scratch_database():
        passed_on = routing.compare(quick=quick, scale=scale)  # forks: before there are threads
        snowflake()
        for number in range(rounds):
            turn = {
                "ids_per_second": in_threads(snowflake, count),
                "uuid4_per_second": in_threads(uuid4, count),
                "ids_per_second_1_thread": per_second(snowflake, count),
                "uuid4_per_second_1_thread": per_second(uuid4, count),
                "ids_per_second_in_thousands": 1000 * per_second(lambda: snowflakes(1000), 100),
            }
            measured.append(turn)
            print(f"{number + 1}/{rounds}: {turn['ids_per_second']:.0f} ids/s", flush=True)
        tables = sharded.compare(scale=scale, quick=quick)
    one = [r["ids_per_second_1_thread"] / r["uuid4_per_second_1_thread"] for r in measured]
    four = [r["ids_per_second"] / r["uuid4_per_second"] for r in measured]
    return {
        "ratios": {
            "ids_vs_uuid4": round(statistics.median(one), 4),
            "ids_vs_uuid4_4_threads": round(statistics.median(four), 4),
            **passed_on.pop("ratios"),
            **tables.pop("ratios"),
        },
        "asked": ASKED,
        "rounds": measured,
        "routing": passed_on,
        "sharded": tables,
    }


def per_second(make: Callable[[], object], count: int) -> float:
    begin = time.perf_counter()
    for _ in range(count):
        make()
    return count / (time.perf_counter() - begin)


def in_threads(make: Callable[[], object], count: int) -> float:
    """Return how many four threads make in a second, together."""
    start = Barrier(THREADS + 1)

    def work() -> None:
        start.wait()
        for _ in range(count):
            make()

    threads = [Thread(target=work) for _ in range(THREADS)]
    for thread in threads:
        thread.start()
    start.wait()
    begin = time.perf_counter()
    for thread in threads:
        thread.join()
    return THREADS * count / (time.perf_counter() - begin)
