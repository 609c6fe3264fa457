"""The drain to RabbitMQ: batches with confirms, beside one confirm at a time.

One process, PostgreSQL and RabbitMQ, in turns. Every message is persistent and mandatory, in a
durable queue, and a row is deleted after its own confirm:

- ``single``: the drain as it publishes where it cannot send batches, one message and its confirm
- ``batch``: the drain
- ``delay``: a loop of plain Celery's ``.delay()`` that waits for each confirm, with no database
"""

from __future__ import annotations

import os
import statistics
from typing import Any
from unittest import mock

import django

from .drain import loop_of_delay, per_second, stage_jobs

ASKED = {"rabbitmq_vs_single_confirm": "at least 8"}


def run(*, quick: bool) -> dict[str, Any]:
    """Run the rounds.

    Returns:
        ``ratios`` (medians over the rounds), ``asked``, and ``rounds`` (jobs per second each).
    """
    django.setup()
    from django.core.management import call_command

    call_command("migrate", verbosity=0)
    jobs, rounds = (4_000, 5) if quick else (20_000, 9)
    measured = []
    round_(500)  # warm
    for number in range(rounds):
        measured.append(found := round_(jobs))
        line = ", ".join(f"{name} {rate:.0f}/s" for name, rate in found.items())
        print(f"round {number + 1}/{rounds}: {line}", flush=True)
    ratio = statistics.median(each["batch"] / each["single"] for each in measured)
    ratios = {"rabbitmq_vs_single_confirm": round(ratio, 4)}
    return {"ratios": ratios, "asked": ASKED, "rounds": measured}


def round_(jobs: int) -> dict[str, float]:
    """Measure each way once; the slow ones with fewer jobs."""
    from celery import Celery

    from outbox_app.celery import OutboxCelery
    from outbox_app.jobs.drain.publisher import Publisher

    url, few = os.environ["RABBITMQ_URL"], jobs // 10
    plain = Celery("plain", broker=url, set_as_current=False)
    plain.conf.broker_transport_options = {"confirm_publish": True}
    outbox = OutboxCelery("benchmark", broker=url, set_as_current=False)
    delay = sent(outbox, few, lambda: loop_of_delay(plain, few))
    with mock.patch.object(Publisher, "_takes_batches", return_value=False):
        single = drained(outbox, few)
    batch = drained(outbox, jobs)
    plain.close()
    outbox.close()
    return {"delay": delay, "single": single, "batch": batch}


def drained(app: Any, jobs: int) -> float:
    """Stage jobs and drain them. Returns jobs per second of the drain."""
    from outbox_app.jobs.drain.drain import Drain

    stage_jobs(app, jobs)
    return sent(app, jobs, lambda: Drain().run(once=True))


def sent(app: Any, jobs: int, work: Any) -> float:
    """Return jobs per second; every message must be in the queue, which is emptied."""
    rate = per_second(jobs, work)
    with app.connection_for_read() as connection:
        arrived = app.amqp.queues["celery"](connection.default_channel).purge()
    if arrived != jobs:
        raise RuntimeError(f"{jobs} messages were sent, {arrived} arrived")
    return rate
