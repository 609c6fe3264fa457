"""Latency: the time from the commit of a job to its arrival in Redis.

One writer commits a row and a job at random moments, ``RATE`` a second on average; the drainer runs
in another process. Contenders take turns. Redis reports when a job arrives (MONITOR), so no
consumer adds a delay of its own.

A contender is a context manager that yields a function, which commits one job and returns its id.
``contenders`` lists the contenders by their names.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import re
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import django

from .losses import scratch_database

ASKED = {
    "wake_p50_vs_interval": "at most 0.08",
    "wake_p99_vs_interval": "at most 0.3",
    "immediate_p50_vs_delay_p50": "at most 1.5",
}
#: Jobs per second.
RATE = 200
#: The polling interval in seconds. The ratios of wake-ups are latencies divided by it.
INTERVAL = 0.1
#: Finds the id of a Celery message in a line of MONITOR.
_ID = re.compile(rb'"LPUSH".*?\\"id\\": \\"([0-9a-f-]{36})')
_AT = re.compile(rb"\+([0-9.]+)")

#: Commits one job, calls its argument right after the commit, and returns the job's id.
Commit = Callable[[Callable[[], None]], str]
Contender = Callable[[], AbstractContextManager[Commit]]


def run(*, quick: bool, scale: float = 1.0) -> dict[str, Any]:
    """Run the rounds.

    Args:
        quick: Fewer and smaller rounds.
        scale: Fraction of the jobs, in a single round.

    Returns:
        ``ratios`` (medians over the rounds), ``asked``, and ``rounds``: p50, p95 and p99 of each
        contender, in seconds.
    """
    django.setup()
    jobs, rounds = (300, 5) if quick else (2_000, 9)
    if scale < 1:
        jobs, rounds = max(10, int(jobs * scale)), 1
    measured = []
    with scratch_database("default"):
        for number in range(rounds):
            measured.append({name: latencies(each, jobs) for name, each in contenders().items()})
            print(f"round {number + 1}/{rounds}: " + _line(measured[-1]), flush=True)
    ratios = _ratios(measured)
    asked = {name: ASKED[name] for name in ratios}
    return {"ratios": ratios, "asked": asked, "rounds": measured}


def contenders() -> dict[str, Contender]:
    """Return the contenders for the database of this run: only PostgreSQL wakes a drainer."""
    from django.db import connection

    woken_ones = {"wake": woken, "poll": polled} if connection.vendor == "postgresql" else {}
    return {**woken_ones, "immediate": immediately, "delay": delayed}


@contextmanager
def woken() -> Iterator[Commit]:
    """Stage a job; the commit wakes the drainer."""
    with drainer(interval=None, wake=True):
        yield staged


@contextmanager
def polled() -> Iterator[Commit]:
    """Stage a job; no commit wakes the drainer, which polls."""
    with drainer(interval=INTERVAL, wake=False):
        yield staged


@contextmanager
def immediately() -> Iterator[Commit]:
    """Stage a job; this process publishes it right after the commit."""
    from django.conf import settings
    from django.db import connection, transaction
    from django.test import override_settings

    def commit(note: Callable[[], None]) -> str:
        with transaction.atomic():
            write(lambda: None)
            id = str(_staging_task().delay(1, note="a customer's order").id)
            # The outbox publishes before all other callbacks run: insert ``note`` ahead of it.
            connection.run_on_commit.insert(0, (set(), note, False))  # type: ignore[arg-type]
        return id

    with override_settings(OUTBOX={**settings.OUTBOX, "IMMEDIATE": True}):
        yield commit


@contextmanager
def delayed() -> Iterator[Commit]:
    """Call plain Celery's ``.delay()`` after the commit."""
    from celery import Celery
    from django.db import transaction

    task = _task(Celery("plain", broker=os.environ["REDIS_URL"], set_as_current=False))

    def commit(note: Callable[[], None]) -> str:
        with transaction.atomic():
            write(note)
        return str(task.delay(1, note="a customer's order").id)

    yield commit


def staged(note: Callable[[], None]) -> str:
    """Commit a row and a staged job."""
    from django.db import transaction

    with transaction.atomic():
        write(note)
        return str(_staging_task().delay(1, note="a customer's order").id)


def write(note: Callable[[], None]) -> None:
    """Write a business row, and register ``note`` as the first callback after the commit."""
    from django.db import transaction

    from .models import Row

    transaction.on_commit(note)
    Row.objects.create(pk=random.randbytes(8).hex(), state={})


def latencies(contender: Contender, jobs: int) -> dict[str, float]:
    """Commit so many jobs, and return the percentiles of their latencies."""
    committed: dict[str, float] = {}
    noted: list[float] = []
    with contender() as commit, arrivals() as arrived:
        due = time.perf_counter()
        for number in range(RATE + jobs):
            due += random.expovariate(RATE)
            time.sleep(max(0.0, due - time.perf_counter()))
            id = commit(lambda: noted.append(time.time()))
            if number >= RATE:  # after a second of warming
                committed[id] = noted[-1]
        until = time.monotonic() + 60
        while committed.keys() - arrived.keys():
            if time.monotonic() > until:
                raise RuntimeError(f"{len(committed.keys() - arrived.keys())} jobs did not arrive")
            time.sleep(0.1)
    cuts = statistics.quantiles((arrived[id] - at for id, at in committed.items()), n=100)
    return {"p50": cuts[49], "p95": cuts[94], "p99": cuts[98]}


@contextmanager
def arrivals() -> Iterator[dict[str, float]]:
    """Yield a dictionary that fills with the time at which each job arrives in Redis, by its id."""
    from redis import Redis

    client = Redis.from_url(os.environ["REDIS_URL"])
    client.flushdb()
    arrived: dict[str, float] = {}

    def read(connection: Any) -> None:
        buffer = b""
        while data := connection._sock.recv(1 << 20):
            *lines, buffer = (buffer + data).split(b"\r\n")
            for line in lines:
                for id in _ID.findall(line):
                    arrived[id.decode()] = float(_AT.match(line)[1])  # type: ignore[index]

    with client, client.monitor() as monitor:
        connection = monitor.connection
        connection._sock.settimeout(None)
        reader = threading.Thread(target=read, args=[connection], daemon=True)
        reader.start()
        yield arrived
        connection._sock.shutdown(2)
        reader.join()


@contextmanager
def drainer(*, interval: float | None, wake: bool) -> Iterator[None]:
    """Run a drainer in another process. With ``wake``, commits of this process wake it."""
    from django.conf import settings
    from django.db import connections

    connections.close_all()  # a forked child must not share a connection
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    child = context.Process(target=_drain, args=[interval, ready])
    child.start()
    before = settings.OUTBOX
    settings.OUTBOX = {**before, "WAKE": wake}
    try:
        if not ready.wait(60):
            raise RuntimeError("the drainer did not start")
        yield
    finally:
        settings.OUTBOX = before
        child.terminate()
        child.join()


def _drain(interval: float | None, ready: Any) -> None:
    from outbox_app.jobs.drain.drain import Drain

    _staging_task()
    drain = Drain(interval=interval, on_turn=lambda _: ready.set())
    signal.signal(signal.SIGTERM, lambda *_: drain.stop())
    drain.run()


_tasks: list[Any] = []


def _staging_task() -> Any:
    if not _tasks:
        from outbox_app.celery import OutboxCelery

        app = OutboxCelery("benchmark", broker=os.environ["REDIS_URL"], set_as_current=False)
        _tasks.append(_task(app))
    return _tasks[0]


def _task(app: Any) -> Any:
    @app.task(name="benchmarks.place", ignore_result=True)
    def place(number: int, note: str) -> None: ...

    return place


def _ratios(rounds: list[dict[str, dict[str, float]]]) -> dict[str, float]:
    def median(name: str, part: str) -> float:
        return round(statistics.median(each[name][part] for each in rounds) / INTERVAL, 4)

    immediate = statistics.median(
        each["immediate"]["p50"] / each["delay"]["p50"] for each in rounds
    )
    ratios = {"immediate_p50_vs_delay_p50": round(immediate, 4)}
    if "wake" in rounds[0]:
        ratios |= {f"wake_{part}_vs_interval": median("wake", part) for part in ("p50", "p99")}
    return ratios


def _line(found: dict[str, dict[str, float]]) -> str:
    return ", ".join(
        f"{name} " + " ".join(f"{part} {1000 * value:.1f}" for part, value in parts.items())
        for name, parts in found.items()
    )
