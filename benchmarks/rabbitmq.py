"""The drain to RabbitMQ: batches with confirms, beside one confirm at a time.

One process, PostgreSQL and RabbitMQ, in turns. Every message is persistent, in a durable queue, and
confirmed; the drain's messages are also mandatory, and it deletes a row after the row's confirm:

- ``single``: the drain without batches: it waits for the confirm of each message
- ``batch``: the drain as it is
- ``delay``: a loop of plain Celery's ``.delay()`` that waits for each confirm, with no database
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest import mock

from . import jobs as staged
from .drain import loop_of_delay
from .jobs import Round, median, per_second

ASKED = {"rabbitmq_vs_single_confirm": "at least 8"}


def run(*, quick: bool, scale: float = 1.0) -> dict[str, Any]:
    """Run the rounds.

    Returns:
        ``ratios`` (medians over the rounds), ``asked``, and ``rounds`` (jobs per second each).
    """
    app = staged.prepare("default", broker="RABBITMQ_URL")
    jobs, rounds = staged.part(scale, *((5_000, 7) if quick else (20_000, 9)))
    staged.keep(app, jobs, using="default")
    measured = []
    round_(app, min(jobs, 500))  # warm
    for number in range(rounds):
        measured.append(found := round_(app, jobs))
        line = ", ".join(f"{name} {rate:.0f}/s" for name, rate in found.items())
        print(f"round {number + 1}/{rounds}: {line}", flush=True)
    ratios = {"rabbitmq_vs_single_confirm": median(measured, "batch", "single")}
    return {"ratios": ratios, "asked": ASKED, "rounds": measured}


def round_(app: Any, jobs: int) -> Round:
    """Measure each way once; the slow ones with fewer jobs."""
    from celery import Celery

    from outbox_app.jobs.drain.publisher import Publisher

    few = jobs // 10
    plain = Celery("plain", broker=os.environ["RABBITMQ_URL"], set_as_current=False)
    plain.conf.broker_transport_options = {"confirm_publish": True}
    delay = sent(app, few, lambda: loop_of_delay(plain, few))
    plain.close()
    with mock.patch.object(Publisher, "_takes_batches", return_value=False):
        single = drained(app, few)
    return {"delay": delay, "single": single, "batch": drained(app, jobs)}


def drained(app: Any, jobs: int) -> float:
    """Commit jobs and drain them. Returns jobs per second of the drain."""
    from outbox_app.jobs.drain.drain import Drain

    staged.copy(jobs)
    return sent(app, jobs, Drain(max_jobs=jobs).run)


def sent(app: Any, jobs: int, work: Callable[[], Any]) -> float:
    """Return jobs per second, and empty the queue.

    Raises:
        RuntimeError: The queue does not have every message.
    """
    rate = per_second(jobs, work)
    with app.connection_for_read() as connection:
        arrived = app.amqp.queues["celery"](connection.default_channel).purge()
    if arrived != jobs:
        raise RuntimeError(f"{jobs} messages were sent, {arrived} arrived")
    return rate
