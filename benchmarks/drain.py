"""The drain beside a loop of ``.delay()``, and beside the fastest way to the same Redis.

In turns, the same jobs:

- ``delay``: a loop of plain Celery's ``.delay()``, as a web process would do it
- ``peer``: django-celery-outbox's relay, at its best settings
- ``ceiling``: the same finished messages through kombu's batch, with no database at all
- ``postgres``, ``mariadb``, ``sqlite``: one drainer reads, publishes and deletes the staged rows
- ``one``, ``two``, ``four``: so many drainer processes on PostgreSQL, for jobs with ordering keys;
  jobs that arrive twice, or out of their key's order, are counted
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from typing import Any

from . import jobs as staged
from . import peers
from .jobs import ALIASES, KEYED, Round, emptied, median, per_second, task, wait_for

ASKED = {
    "drain_vs_delay": "at least 8.5",
    "drain_vs_ceiling": "at least 0.65",
    "drain_vs_peer": "at least 20",
    "mariadb_vs_postgres": "at least 0.6",
    "sqlite_vs_postgres": "at least 0.6",
    "two_drainers_vs_one": "at least 1.1",
    "four_drainers_vs_one": "",
    "duplicates": "0",
    "out_of_order": "0",
    "statements_per_job": "at most 0.01",
}
#: Rows of a batch in the run that counts statements.
BATCH = 500


def run(*, quick: bool, scale: float = 1.0) -> dict[str, Any]:
    """Run the rounds.

    Returns:
        ``ratios`` (medians over the rounds), ``asked``, and ``rounds`` (jobs per second each).
    """
    # Many short rounds: on a shared machine the median of a few long ones depends on chance.
    jobs, rounds = (8_000, 5) if quick else (20_000, 15)
    jobs, rounds = staged.part(scale, jobs, rounds)
    app = staged.prepare(*ALIASES.values())
    for alias in ALIASES.values():
        staged.keep(app, jobs, using=alias)
    staged.keep(app, jobs, using="default", table=KEYED)
    measured = []
    with ExitStack() as stack:
        if scale >= 1:
            peers.install()
            peer = stack.enter_context(peers.Peer("django-celery-outbox"))
        round_(app, jobs // 4)  # warm
        for number in range(rounds):
            measured.append(round_(app, jobs))
            if scale >= 1:
                measured[-1]["peer"] = peer.move(jobs // 20)
            print(f"round {number + 1}/{rounds}: " + _line(measured[-1]), flush=True)
    return {"ratios": _ratios(measured), "asked": ASKED, "rounds": measured}


def round_(app: Any, jobs: int) -> Round:
    """Measure each way once."""
    from celery import Celery

    from outbox_app.jobs.drain.drain import Drain

    plain = Celery("plain", broker=os.environ["REDIS_URL"], set_as_current=False)
    found: Round = {}
    with emptied(expect=jobs // 5):
        found["delay"] = per_second(jobs // 5, lambda: loop_of_delay(plain, jobs // 5))
    plain.close()
    staged.copy(jobs)
    rows = messages()
    with emptied(expect=jobs):
        found["ceiling"] = per_second(jobs, lambda: publish_batches(app, rows))
    for name, alias in ALIASES.items():
        staged.copy(jobs, using=alias)
        with emptied(expect=jobs):
            found[name] = per_second(jobs, Drain(using=alias, max_jobs=jobs).run)
    for name, count in {"one": 1, "two": 2, "four": 4}.items():
        found[name] = together(count, jobs)
        for fault, times in faults(jobs).items():
            found[fault] = found.get(fault, 0) + times
    found["statements_per_job"] = statements_per_job(jobs)
    return found


def loop_of_delay(app: Any, jobs: int) -> None:
    """Send the jobs one by one, as plain Celery does."""
    place = task(app)
    for number in range(jobs):
        place.delay(number, **staged.order(number))


def messages() -> list[tuple[bytes, Any]]:
    """Return the finished messages of the table, already decoded."""
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


def statements_per_job(jobs: int) -> float:
    """Drain in batches of ``BATCH``. Returns statements per job, the drainer's start included."""
    from outbox_app.jobs.drain.drain import Drain

    staged.copy(jobs)
    with emptied(expect=jobs), counting_statements() as statements:
        Drain(batch_size=BATCH, max_jobs=jobs).run()
    return statements[0] / jobs


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


def together(count: int, jobs: int) -> float:
    """Return jobs per second of drainers that already share the shards when jobs are committed."""
    from django.db import connections
    from django.test import override_settings

    fork = get_context("fork")
    staged.redis().flushdb()
    staged.copy(0)
    connections.close_all()
    # Drainers rebalance the shards five times a lease: with a short lease a round begins soon.
    with override_settings(OUTBOX={"LEASE_SECONDS": 1.5, "PUBLISH_TIMEOUT": 0.5}):
        drainers = [fork.Process(target=drain_until_terminated) for _ in range(count)]
        for drainer in drainers:
            drainer.start()
    try:
        wait_for(lambda: is_shared(count))
        staged.copy(jobs, table=KEYED)
        return per_second(jobs, lambda: wait_for(lambda: not staged.count()))
    finally:
        for drainer in drainers:
            drainer.terminate()
        for drainer in drainers:
            drainer.join()


def faults(jobs: int) -> Round:
    """Return how many jobs arrived twice, and how many after a later job of the same key."""
    sql = f"SELECT task_id, ordering_key FROM {KEYED} ORDER BY id LIMIT {jobs}"
    place = {id: (key, number) for number, (id, key) in enumerate(staged.execute(sql))}
    arrived = staged.arrived_ids()
    newest: dict[str, int] = {}
    out_of_order = 0
    for id in dict.fromkeys(arrived):
        key, number = place.pop(id)
        out_of_order += number < newest.get(key, 0)
        newest[key] = number
    if place:
        raise RuntimeError(f"{len(place)} of {jobs} messages did not arrive")
    return {"duplicates": len(arrived) - jobs, "out_of_order": out_of_order}


def drain_until_terminated() -> None:
    """Drain until SIGTERM. This is the target of the drainer processes."""
    from outbox_app.jobs.drain.drain import Drain

    drain = Drain()
    signal.signal(signal.SIGTERM, lambda *_: drain.stop())
    drain.run()


def is_shared(count: int) -> bool:
    """Return whether every shard has an owner, and there are ``count`` different owners."""
    from outbox_app.models import Lease

    shares = Lease.objects.filter(resource="jobs").values_list("owner", flat=True)
    return len(set(shares)) == count and None not in set(shares)


def _ratios(rounds: list[Round]) -> Round:
    peer = {"drain_vs_peer": median(rounds, "postgres", "peer")} if "peer" in rounds[0] else {}
    return peer | {
        "drain_vs_delay": median(rounds, "postgres", "delay"),
        "drain_vs_ceiling": median(rounds, "postgres", "ceiling"),
        "mariadb_vs_postgres": median(rounds, "mariadb", "postgres"),
        "sqlite_vs_postgres": median(rounds, "sqlite", "postgres"),
        "two_drainers_vs_one": median(rounds, "two", "one"),
        "four_drainers_vs_one": median(rounds, "four", "one"),
        "duplicates": sum(each["duplicates"] for each in rounds),
        "out_of_order": sum(each["out_of_order"] for each in rounds),
        "statements_per_job": max(each["statements_per_job"] for each in rounds),
    }


def _line(r: Round) -> str:
    return (
        f"{r['postgres'] / r['delay']:.1f} x delay, {r['postgres'] / r['ceiling']:.2f} x ceiling, "
        f"two {r['two'] / r['one']:.2f} x one ({r['postgres']:.0f} jobs/s)"
    )
