"""The fleet: snowflake ids beside ``uuid4``; commands that are forwarded, and servers that die
(``routing``); partitioned tables (``sharded``).

Contestants take turns in one process. ``ids_per_second`` of the rounds is the rate of four threads.
The generator reserves time in the database, and renews it, as in production.
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
        scale: Fraction of a million rows, for each table of ``sharded``.

    Returns:
        ``ratios`` (medians over the rounds), ``asked``, and ``rounds`` with ids per second: of one
        thread and of four, each for ``snowflake`` and ``uuid4``.
    """
    django.setup()
    from outbox_app.ids import snowflake, snowflakes

    count, rounds = (5_000, 7) if quick else (50_000, 25)
    measured = []
    with losses.scratch_database():
        passed_on = routing.compare(quick=quick, scale=scale)  # it forks: before any thread starts
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
    """Return how many ids four threads together make in a second."""
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
