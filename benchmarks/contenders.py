"""The contenders of ``peers``: outbox_app and other packages, each used in its fastest way.

Each contender runs in its own processes, with only its applications installed. An outbox has moved
a job when the broker has it; a queue in the database (``done``) when its worker has run it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Iterable
from typing import Any

#: An argument of each job. Together with the number, the arguments have about 200 bytes.
NOTE = "a customer's order of two lines, " * 6
#: The Redis list to which a running job pushes its number. MONITOR shows when it did so.
ARRIVED = "arrived"
#: Seconds between two polls of a contender that commits do not wake.
INTERVAL = 0.1
BATCH = 1000


class Contender:
    """One way from a transaction to the worker, in the process that calls ``begin``."""

    apps: tuple[str, ...] = ()
    #: Whether a job counts as moved when it has run, rather than when the broker has it.
    done = False
    #: Whether it has a call for many jobs, and a move to measure. Its share of outbox_app's jobs.
    stages_many, moves, share = False, True, 0.1

    def begin(self) -> None:
        from celery import Celery

        self.task = place_of(Celery("peers", broker=broker(), set_as_current=False))

    def stage(self, number: int) -> None:
        """Stage a job in the open transaction."""
        self.task.delay(number, note=NOTE)

    def stage_many(self, numbers: Iterable[int]) -> None:
        """Stage jobs in as few statements as it can."""
        for number in numbers:
            self.stage(number)

    def move(self) -> None:
        """Move all staged jobs."""
        raise NotImplementedError

    def at_once(self, chosen: bool, /) -> None:
        """Switch to publishing right after the commit, or back, if the contender has both modes."""

    def serve(self) -> None:
        """Move staged jobs until the process is ended. None: the sender publishes them itself."""
        while True:
            self.move()
            time.sleep(INTERVAL)


class OutboxApp(Contender):
    apps = ("outbox_app",)
    stages_many, share = True, 1.0

    def begin(self) -> None:
        from outbox_app.celery import OutboxCelery

        self.task = place_of(OutboxCelery("peers", broker=broker(), set_as_current=False))

    def stage_many(self, numbers: Iterable[int]) -> None:
        from outbox_app import stage_many

        stage_many(self.task.s(number, note=NOTE) for number in numbers)

    def move(self) -> None:
        from outbox_app.jobs.drain.drain import Drain

        Drain().run(once=True)

    def serve(self) -> None:
        from outbox_app.jobs.drain.drain import Drain

        Drain().run()


class PlainCelery(Contender):
    """No outbox: a job is sent after the commit, and lost if the process ends in between."""

    apps = ("django.contrib.contenttypes",)
    moves = False

    def stage(self, number: int) -> None:
        from django.db import transaction

        transaction.on_commit(lambda: self.task.delay(number, note=NOTE))

    serve = None


class CeleryOutbox(Contender):
    apps = ("django_celery_outbox",)

    def begin(self) -> None:
        import structlog
        from django_celery_outbox.app import OutboxCelery
        from django_celery_outbox.relay import Relay, RelayConfig

        structlog.configure(
            wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL),
            cache_logger_on_first_use=True,
        )
        app = OutboxCelery("peers", broker=broker(), set_as_current=False)
        self.task = place_of(app)
        self.relay = Relay(
            app, RelayConfig.init(batch_size=BATCH, idle_time=0, publish_concurrency=8)
        )

    def move(self) -> None:
        from django_celery_outbox.models import CeleryOutbox

        while CeleryOutbox.objects.exists():
            self.relay._processing()


class Jaiminho(Contender):
    """Throughput is measured with its relay, latency with its publishing after the commit."""

    apps = ("jaiminho",)

    def begin(self) -> None:
        super().begin()
        from jaiminho.send import save_to_outbox

        self.at_once(False)
        _tasks["place"] = self.task
        self.save = save_to_outbox(send)

    def stage(self, number: int) -> None:
        self.save(number, NOTE)

    def move(self) -> None:
        from jaiminho.relayer import EventRelayer

        EventRelayer().relay()

    def at_once(self, chosen: bool, /) -> None:
        from jaiminho import settings
        from jaiminho.constants import PublishStrategyType as Strategy

        settings.publish_strategy = Strategy.PUBLISH_ON_COMMIT if chosen else Strategy.KEEP_ORDER

    serve = None


class Procrastinate(Contender):
    apps = ("procrastinate.contrib.django",)
    done, stages_many = True, True

    def begin(self) -> None:
        from procrastinate.contrib.django import app

        @app.task(name="place")
        async def place(number: int, note: str) -> None:
            run(number, note)

        self.app, self.task = app, place

    def stage(self, number: int) -> None:
        self.task.defer(number=number, note=NOTE)

    def stage_many(self, numbers: Iterable[int]) -> None:
        self.task.batch_defer(*({"number": number, "note": NOTE} for number in numbers))

    def move(self) -> None:
        asyncio.run(self._work(wait=False))

    def serve(self) -> None:
        asyncio.run(self._work(wait=True))

    async def _work(self, *, wait: bool) -> None:
        with self.app.replace_connector(self.app.connector.get_worker_connector()) as app:
            async with app.open_async():
                await app.run_worker_async(
                    wait=wait,
                    concurrency=30,
                    delete_jobs="successful",
                    install_signal_handlers=False,
                )


class DjangoTasks(Contender):
    apps = ("django_tasks", "django_tasks_db")
    done = True

    def begin(self) -> None:
        from django_tasks import task

        module = sys.modules[__name__]
        self.task = module.run = task(run)

    def stage(self, number: int) -> None:
        self.task.enqueue(number, note=NOTE)

    def move(self) -> None:
        self._work(batch=True)

    def serve(self) -> None:
        self._work(batch=False)

    def _work(self, *, batch: bool) -> None:
        from django_tasks_db.management.commands.db_worker import Worker
        from django_tasks_db.models import DBTaskResult

        Worker(
            queue_names=["default"],
            interval=INTERVAL,
            batch=batch,
            backend_name="default",
            startup_delay=False,
            max_tasks=None,
            worker_id="benchmark",
            excluded_queue_names=[],
        ).run()
        DBTaskResult.objects.all().delete()


CONTENDERS: dict[str, type[Contender]] = {
    "outbox_app": OutboxApp,
    "Celery": PlainCelery,
    "django-celery-outbox": CeleryOutbox,
    "django-jaiminho": Jaiminho,
    "procrastinate": Procrastinate,
    "django-tasks-db": DjangoTasks,
}


def broker() -> str:
    return os.environ["REDIS_URL"]


def place_of(app: Any) -> Any:
    """Register and return the task that the outboxes send."""

    @app.task(name="benchmarks.place", ignore_result=True)
    def place(number: int, note: str) -> None: ...

    return place


_tasks: dict[str, Any] = {}
_redis: dict[str, Any] = {}


def send(number: int, note: str) -> None:
    """Send a job. Defined at module level, because jaiminho stores the function's name."""
    _tasks["place"].delay(number, note=note)


def run(number: int, note: str) -> None:
    """Run as the job. Push its number to Redis, unless it is negative: then nothing is timed."""
    if number < 0:
        return
    if not _redis:
        import redis

        _redis["client"] = redis.Redis.from_url(broker())
    _redis["client"].rpush(ARRIVED, number)
