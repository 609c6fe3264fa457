"""The cost of a job in the outbox: CPU, bytes of WAL, statements. With PostgreSQL and Redis.

- ``stage_1``, ``stage_100``: one job and a hundred in each transaction, each by its own ``delay()``
- ``stage_many``: a hundred jobs in each transaction, by one call
- ``drain``: one drainer moves the jobs from the table to the broker
- ``idle``: one second of the same drainer without jobs

CPU is counted for this process, for its PostgreSQL backend, and for Redis.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import django

from .contenders import OutboxApp, broker
from .drain import counting_statements
from .losses import scratch_database

ASKED: dict[str, str] = {}
#: The counters, each with its title in the table.
COUNTED = {
    "process_us": "CPU of Python, us",
    "backend_us": "CPU of its PostgreSQL backend, us",
    "redis_us": "CPU of Redis, us",
    "wal_bytes": "WAL, bytes",
    "statements": "statements",
}
TICK = 1_000_000 / os.sysconf("SC_CLK_TCK")

Costs = dict[str, float]


def run(*, quick: bool, scale: float = 1.0) -> dict[str, Any]:
    """Run the rounds.

    Returns:
        ``ratios`` (here the medians of the costs per job), ``tables``, and ``rounds``.
    """
    django.setup()
    jobs, rounds, seconds = (2_000, 5, 1.0) if quick else (20_000, 9, 5.0)
    jobs, seconds = max(100, int(jobs * scale)), seconds * scale
    measured = []
    with scratch_database():
        contender = OutboxApp()
        contender.begin()
        for number in range(rounds if scale == 1 else 1):
            measured.append(round_(contender, jobs, seconds))
            print(f"round {number + 1}/{rounds}: {measured[-1]['drain']}", flush=True)
    steps = list(measured[0])
    medians = {
        step: {what: statistics.median(each[step][what] for each in measured) for what in COUNTED}
        for step in steps
    }
    lines = [[step, *(f"{medians[step][what]:,.4g}" for what in COUNTED)] for step in steps]
    return {
        "ratios": {
            f"{step}_{what}": round(medians[step][what], 4) for step in steps for what in COUNTED
        },
        "asked": ASKED,
        "tables": {
            "A job; a second of a drainer that has nothing to do": (["", *COUNTED.values()], lines)
        },
        "rounds": measured,
    }


def round_(contender: OutboxApp, jobs: int, seconds: float) -> dict[str, Costs]:
    """Measure each step once."""
    from django.db import connection

    from outbox_app.models import StagedJob

    def stage(size: int, *, many: bool = False) -> None:
        from django.db import transaction

        for start in range(0, jobs, size):
            numbers = range(start, min(start + size, jobs))
            with transaction.atomic():
                if many:
                    contender.stage_many(numbers)
                else:
                    for number in numbers:
                        contender.stage(number)

    found = {}
    for name, work in {
        "stage_1": lambda: stage(1),
        "stage_100": lambda: stage(100),
        "stage_many": lambda: stage(100, many=True),
    }.items():
        with connection.cursor() as cursor:
            cursor.execute(f"TRUNCATE {StagedJob._meta.db_table}")
        found[name] = cost(work, jobs)
    found["drain"] = cost(contender.move, jobs)
    found["idle"] = idle(seconds)
    return found


def idle(seconds: float) -> Costs:
    """Return the cost per second of a drainer without jobs, from its first turn on."""
    from outbox_app.jobs.drain.drain import Drain

    marks: list[tuple[float, Costs]] = []

    def look(drain: Drain) -> None:
        now = time.monotonic()
        if not marks or now > marks[0][0] + seconds:
            marks.append((now, {**counters(), "statements": statements[0]}))
        if len(marks) > 1:
            drain.stop()

    with counting_statements() as statements:
        Drain(on_turn=look).run()
    (began, before), (ended, after) = marks
    return {what: (after[what] - before[what]) / (ended - began) for what in before}


def cost(work: Callable[[], Any], jobs: int) -> Costs:
    """Return the cost of ``work``, divided by the number of jobs."""
    before = counters()
    with counting_statements() as statements:
        work()
    after = counters()
    return {what: (after[what] - before[what]) / jobs for what in before} | {
        "statements": statements[0] / jobs
    }


def counters() -> Costs:
    """Return the counters of this process, its backend, and Redis, as they are now."""
    import redis
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute("SELECT pg_backend_pid(), pg_wal_lsn_diff(pg_current_wal_lsn(), '0/0')")
        backend, wal = cursor.fetchone()
    with redis.Redis.from_url(broker()) as client:
        cpu = client.info("cpu")
    # The 12th and 13th fields after "(postgres: …)" are the ticks in user mode and in the kernel.
    fields = Path(f"/proc/{backend}/stat").read_text().rsplit(")", 1)[1].split()
    return {
        "process_us": 1e6 * time.process_time(),
        "backend_us": TICK * (int(fields[11]) + int(fields[12])),
        "redis_us": 1e6 * (cpu["used_cpu_user"] + cpu["used_cpu_sys"]),
        "wal_bytes": float(wal),
    }
