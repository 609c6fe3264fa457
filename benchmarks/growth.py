"""The drain with a large backlog, an old snapshot, a killed drainer. PostgreSQL and Redis.

- ``many``, ``few``: the first 10,000 jobs of five million, and 10,000 jobs without any others
- ``held``, ``free``: 200,000 jobs in batches of 2,000, with an open snapshot, and without one
- ``recovery``: seconds from ``kill -9`` of one of two drainers until the jobs of its shards have
  left, divided by the seconds of its lease
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any

from . import drain, jobs
from .jobs import COPY, Round, emptied, median, per_second, wait_for

ASKED = {
    "drain_5m_vs_10k": "at least 0.85",
    "drain_held_snapshot_vs_none": "at least 0.85",
    "recovery_vs_lease": "at most 1.3",
}
BATCH = 2_000
#: The name of a table of jobs while another table has the name of the outbox.
ASIDE = "benchmark_aside"


def run(*, quick: bool, scale: float = 1.0) -> dict[str, Any]:
    """Run the rounds.

    Returns:
        ``ratios`` (medians over the rounds), ``asked``, and ``rounds`` (jobs per second each).
    """
    kept, rounds = jobs.part(scale, 10_000, 5)
    waiting, churned = (20 * kept, 4 * kept) if quick else (500 * kept, 20 * kept)
    lease = 4.0 * max(scale, 0.25) if quick else 10.0
    app = jobs.prepare("default")
    jobs.keep(app, kept, using="default")
    measured: list[Round] = [{} for _ in range(rounds)]
    with aside_of(waiting, of=kept):
        depth(kept)  # warm
        for each in measured:
            each["few"] = depth(kept)
            swap()
            each["many"] = depth(kept, fill=False)
            swap()
            print(f"{waiting} waiting: {each['many'] / each['few']:.2f} x {kept}", flush=True)
    for number, each in enumerate(measured):
        for name in ("held", "free") if number % 2 else ("free", "held"):
            each[name] = churn(churned, of=kept, held=name == "held")
        print(f"snapshot held: {each['held'] / each['free']:.2f} x free", flush=True)
    for each in measured[: 3 if quick else None]:
        each["recovery"], each["lease"] = recovery(lease, of=kept), lease
        print(f"recovered after {each['recovery'] / lease:.2f} x the lease", flush=True)
    return {"ratios": _ratios(measured), "asked": ASKED, "rounds": measured, "waiting": waiting}


def depth(count: int, *, fill: bool = True) -> float:
    """Drain so many jobs, of the table as it is or, with ``fill``, refilled. Returns the rate."""
    from outbox_app.jobs.drain.drain import Drain

    if fill:
        jobs.copy(count)
    jobs.redis().flushdb()
    return per_second(count, Drain(max_jobs=count).run)


def churn(count: int, *, of: int, held: bool) -> float:
    """Drain so many jobs in batches of ``BATCH``, with or without a snapshot. Returns the rate."""
    from outbox_app.jobs.drain.drain import Drain

    jobs.copy(0)
    fill(count, of=of)
    with snapshot(held=held), emptied(expect=count):
        return per_second(count, Drain(batch_size=BATCH, max_jobs=count).run)


def recovery(lease: float, *, of: int) -> float:
    """Return the seconds from the kill of a drainer until the jobs of its shards have left."""
    from django.db import connections
    from django.test import override_settings

    fork = get_context("fork")
    jobs.copy(0)
    connections.close_all()
    with override_settings(OUTBOX={"LEASE_SECONDS": lease, "PUBLISH_TIMEOUT": lease / 4}):
        drainers = [fork.Process(target=drain.drain_until_terminated) for _ in range(2)]
        for each in drainers:
            each.start()
    try:
        wait_for(lambda: drain.is_shared(2))
        os.kill(drainers[0].pid or 0, signal.SIGKILL)
        killed = time.perf_counter()
        jobs.copy(of)
        wait_for(lambda: not jobs.count())
        return time.perf_counter() - killed
    finally:
        for each in drainers:
            each.terminate()
        for each in drainers:
            each.join()


def fill(count: int, *, of: int) -> None:
    """Commit so many jobs, as copies of the ``of`` jobs that were kept."""
    for _ in range(count // of):
        jobs.copy(of, empty=False)


@contextmanager
def aside_of(count: int, *, of: int) -> Iterator[None]:
    """Keep a second table, with so many jobs, for ``swap``."""
    fill(count, of=of)
    jobs.execute(f"ALTER TABLE outbox_stagedjob RENAME TO {ASIDE}")
    jobs.execute(f"CREATE TABLE outbox_stagedjob (LIKE {ASIDE} INCLUDING ALL)")
    jobs.execute(f"VACUUM ANALYZE {ASIDE}")
    try:
        yield
    finally:
        jobs.execute("DROP TABLE outbox_stagedjob")
        jobs.execute(f"ALTER TABLE {ASIDE} RENAME TO outbox_stagedjob")
        jobs.copy(0)


def swap() -> None:
    """Exchange the names of the two tables."""
    jobs.execute("ALTER TABLE outbox_stagedjob RENAME TO benchmark_swapped")
    jobs.execute(f"ALTER TABLE {ASIDE} RENAME TO outbox_stagedjob")
    jobs.execute(f"ALTER TABLE benchmark_swapped RENAME TO {ASIDE}")


@contextmanager
def snapshot(*, held: bool) -> Iterator[None]:
    """Hold a snapshot open on a separate connection, if ``held``."""
    from django.db import connections

    other = connections.create_connection("default")
    try:
        if held:
            with other.cursor() as cursor:
                cursor.execute("BEGIN ISOLATION LEVEL REPEATABLE READ")
                cursor.execute(f"SELECT count(*) FROM {COPY}")
        yield
    finally:
        other.close()


def _ratios(rounds: list[Round]) -> Round:
    recovered = [each for each in rounds if "recovery" in each]
    return {
        "drain_5m_vs_10k": median(rounds, "many", "few"),
        "drain_held_snapshot_vs_none": median(rounds, "held", "free"),
        "recovery_vs_lease": median(recovered, "recovery", "lease"),
    }
