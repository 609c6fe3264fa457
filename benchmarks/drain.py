"""The drain beside a loop of ``.delay()``, and beside the fastest way to the same Redis.

One process, PostgreSQL and Redis, in turns:

- ``delay``: a loop of plain Celery's ``.delay()``, as a web process would do it
- ``drain``: staged rows, read, published and deleted by one drainer
- ``ceiling``: the same finished messages through kombu's batch, with no database at all
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import django

ASKED = {
    "drain_vs_delay": "at least 6",
    "drain_vs_ceiling": "at least 0.4",
    "statements_per_job": "at most 0.02",
}


def run(*, quick: bool) -> dict[str, Any]:
    """Run the rounds.

    Returns:
        ``ratios`` (medians over the rounds), ``asked``, and ``rounds`` (jobs per second each).
    """
    django.setup()
    from django.core.management import call_command
    from redis import Redis

    call_command("migrate", verbosity=0)
    # Many short rounds: on a shared machine the median of few long ones is an accident.
    jobs, rounds = (5_000, 9) if quick else (20_000, 25)
    redis = Redis.from_url(os.environ["REDIS_URL"])
    measured = []
    round_(redis, 2_000)  # warm
    for number in range(rounds):
        measured.append(round_(redis, jobs))
        print(f"round {number + 1}/{rounds}: " + _line(measured[-1]), flush=True)
    return {"ratios": _ratios(measured), "asked": ASKED, "rounds": measured}


def round_(redis: Any, jobs: int) -> dict[str, float]:
    """Measure each way once."""
    from celery import Celery

    from outbox_app.celery import OutboxCelery
    from outbox_app.jobs.drain.drain import Drain

    url = os.environ["REDIS_URL"]
    plain = Celery("plain", broker=url, set_as_current=False)
    outbox = OutboxCelery("benchmark", broker=url, set_as_current=False)
    with emptied(redis, expect=jobs // 5):
        delay = per_second(jobs // 5, lambda: loop_of_delay(plain, jobs // 5))
    stage_jobs(outbox, jobs)
    rows = staged_rows()
    with emptied(redis, expect=jobs):
        ceiling = per_second(jobs, lambda: publish_batches(outbox, rows))
    with emptied(redis, expect=jobs), counting_statements() as statements:
        drain = per_second(jobs, lambda: Drain().run(once=True))
    plain.close()
    outbox.close()
    return {
        "delay": delay,
        "ceiling": ceiling,
        "drain": drain,
        "statements_per_job": statements[0] / jobs,
    }


def loop_of_delay(app: Any, jobs: int) -> None:
    """Send one by one, as plain Celery does."""
    task = _task(app)
    for number in range(jobs):
        task.delay(number, note="a customer's order")


def stage_jobs(app: Any, jobs: int) -> None:
    """Stage the same calls in one transaction."""
    from django.db import transaction

    from outbox_app import stage_many

    task = _task(app)
    with transaction.atomic():
        stage_many(task.s(number, note="a customer's order") for number in range(jobs))


def staged_rows() -> list[tuple[bytes, Any]]:
    """Return the finished messages of the table, decoded beforehand."""
    from outbox_app.jobs.message import Message
    from outbox_app.models import StagedJob

    found = StagedJob.objects.values_list("body", "envelope")
    return [(bytes(body), Message.loads(envelope)) for body, envelope in found]


def publish_batches(app: Any, rows: list[tuple[bytes, Any]], size: int = 1000) -> None:
    """Publish finished messages through kombu's batch, ``size`` at a time."""
    with app.connection_for_write() as connection:
        producer = connection.Producer(auto_declare=False)
        for start in range(0, len(rows), size):
            with producer.batch(max_size=size):
                for body, message in rows[start : start + size]:
                    producer.publish(
                        body,
                        exchange=message.exchange,
                        routing_key=message.routing_key,
                        headers=message.headers,
                        content_type=message.content_type,
                        content_encoding=message.content_encoding,
                        **message.properties,
                    )


@contextmanager
def emptied(redis: Any, *, expect: int) -> Iterator[None]:
    """Begin with an empty broker; afterwards every message must be there."""
    redis.flushdb()
    yield
    arrived = redis.llen("celery")
    if arrived != expect:
        raise RuntimeError(f"{expect} messages were sent, {arrived} arrived")


@contextmanager
def counting_statements() -> Iterator[list[int]]:
    """Count the statements of the drain's connection."""
    from django.db import connection

    count = [0]

    def counted(execute: Callable[..., Any], *args: Any) -> Any:
        count[0] += 1
        return execute(*args)

    with connection.execute_wrapper(counted):
        yield count


def per_second(jobs: int, work: Callable[[], Any]) -> float:
    """Return jobs per second."""
    started = time.perf_counter()
    work()
    return jobs / (time.perf_counter() - started)


def _task(app: Any) -> Any:
    @app.task(name="benchmarks.place", ignore_result=True)
    def place(number: int, note: str) -> None: ...

    return place


def _ratios(rounds: list[dict[str, float]]) -> dict[str, float]:
    def median(ratio: Callable[[dict[str, float]], float]) -> float:
        return round(statistics.median(ratio(r) for r in rounds), 4)

    return {
        "drain_vs_delay": median(lambda r: r["drain"] / r["delay"]),
        "drain_vs_ceiling": median(lambda r: r["drain"] / r["ceiling"]),
        "statements_per_job": median(lambda r: r["statements_per_job"]),
    }


def _line(r: dict[str, float]) -> str:
    return (
        f"drain {r['drain'] / r['delay']:.1f} x delay, "
        f"{r['drain'] / r['ceiling']:.2f} x ceiling ({r['drain']:.0f} jobs/s)"
    )
