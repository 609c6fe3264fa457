"""Staging beside plain Celery: the time of a call in the calling process. PostgreSQL and Redis.

In turns, each in transactions with a business row:

- ``delay``: plain ``.delay()`` to Redis, a hundred beside each transaction
- ``hundred``: ``.delay()`` of an app that stages, a hundred in each transaction
- ``many``: the same hundred, by ``stage_many``
- ``on_commit``: ``delay_on_commit`` of plain Celery, one in each transaction
- ``one``: ``.delay()`` of an app that stages, one in each transaction
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from . import jobs as staged
from .jobs import Round, median, order, per_second

ASKED = {
    "stage_vs_delay": "at least 1.2",
    "stage_many_vs_delay": "at least 4",
    "stage_one_vs_on_commit": "at least 0.9",
}
#: Jobs of one transaction, except for ``on_commit`` and ``one``.
HUNDRED = 100


def run(*, quick: bool, scale: float = 1.0) -> dict[str, Any]:
    """Run the rounds.

    Returns:
        ``ratios`` (medians over the rounds), ``asked``, and ``rounds`` (jobs per second each).
    """
    # Many short rounds: on a shared machine the median of a few long ones depends on chance.
    jobs, rounds = staged.part(scale, *((1_000, 7) if quick else (3_000, 25)))
    app = staged.prepare("default")
    staged.execute("CREATE TABLE IF NOT EXISTS benchmark_orders (id serial, note text)")
    ways = contestants(app)
    measured = []
    round_(ways, HUNDRED)  # warm
    for number in range(rounds):
        measured.append(round_(ways, jobs))
        print(f"round {number + 1}/{rounds}: " + _line(measured[-1]), flush=True)
    return {"ratios": _ratios(measured), "asked": ASKED, "rounds": measured}


def contestants(app: Any) -> dict[str, Callable[[int], None]]:
    """Return each way to send or stage so many jobs."""
    from celery import Celery
    from celery.contrib.django.task import DjangoTask

    from outbox_app import stage_many

    plain = Celery(
        "plain", broker=os.environ["REDIS_URL"], set_as_current=False, task_cls=DjangoTask
    )
    theirs, ours = staged.task(plain), staged.task(app)

    def many(numbers: range) -> None:
        stage_many(ours.s(number, **order(number)) for number in numbers)

    return {
        "delay": lambda jobs: _transactions(jobs, HUNDRED, _each(theirs.delay)),
        "hundred": lambda jobs: _transactions(jobs, HUNDRED, _each(ours.delay)),
        "many": lambda jobs: _transactions(jobs, HUNDRED, many),
        "on_commit": lambda jobs: _transactions(jobs, 1, _each(theirs.delay_on_commit)),
        "one": lambda jobs: _transactions(jobs, 1, _each(ours.delay)),
    }


def round_(ways: dict[str, Callable[[int], None]], jobs: int) -> Round:
    """Measure each way once."""
    found: Round = {}
    for name, way in ways.items():
        staged.redis().flushdb()
        staged.copy(0)
        found[name] = per_second(jobs, partial(way, jobs))
        if (arrived := staged.count() + staged.redis().llen("celery")) != jobs:
            raise RuntimeError(f"{name}: {arrived} of {jobs} jobs are there")
    return found


def _transactions(jobs: int, size: int, work: Callable[[range], None]) -> None:
    from django.db import transaction

    for first in range(0, jobs, size):
        with transaction.atomic():
            staged.execute("INSERT INTO benchmark_orders (note) VALUES ('an order')")
            work(range(first, first + size))


def _each(call: Callable[..., Any]) -> Callable[[range], None]:
    def work(numbers: range) -> None:
        for number in numbers:
            call(number, **order(number))

    return work


def _ratios(rounds: list[Round]) -> Round:
    return {
        "stage_vs_delay": median(rounds, "hundred", "delay"),
        "stage_many_vs_delay": median(rounds, "many", "delay"),
        "stage_one_vs_on_commit": median(rounds, "one", "on_commit"),
    }


def _line(r: Round) -> str:
    return (
        f"a hundred {r['hundred'] / r['delay']:.2f} x delay, "
        f"stage_many {r['many'] / r['delay']:.2f} x delay, "
        f"one {r['one'] / r['on_commit']:.2f} x on_commit ({r['hundred']:.0f} jobs/s)"
    )
