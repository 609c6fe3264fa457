"""What ``peers`` measures: outbox_app and others, each as fast as it lets itself be used.

Each runs in processes of its own, with only its applications installed. An outbox has moved a job
when the broker has it; a queue in the database (``done``) when its worker has run it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import time
from collections.abc import Iterable
from typing import Any

#: With the number, about 200 bytes of arguments.
NOTE = "a customer's order of two lines, " * 6
#: Where a job that runs says so; Redis says when that was.
ARRIVED = "arrived"
#: Seconds between two looks of those that are not woken.
INTERVAL = 0.1
BATCH = 1000


class Contender:
    """One way from a transaction to the worker, in the process that calls ``begin``."""

    apps: tuple[str, ...] = ()
    #: A job is moved when it has run, not when the broker has it.
    done = False
    #: What else this can do than ``stage``; how many jobs it moves where ours moves one.
    stages_many, moves, share = False, True, 0.1

    def begin(self) -> None:
        from celery import Celery

        self.task = place_of(Celery("peers", broker=broker(), set_as_current=False))

    def stage(self, number: int) -> None:
        """Stage a job in the transaction that is open."""
        self.task.delay(number, note=NOTE)

    def stage_many(self, numbers: Iterable[int]) -> None:
        """Stage jobs in as few statements as it can."""
        for number in numbers:
            self.stage(number)

    def move(self) -> None:
        """Move all that is staged."""
        raise NotImplementedError

    def at_once(self, chosen: bool, /) -> None:
        """Take the shortest way to the worker, where that is another."""

    def serve(self) -> None:
        """Move what is staged, until the process is ended. None where the sender does it."""
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
    """No outbox: sent after the commit, and lost when the process ends before."""

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
    """Relays where throughput is measured; publishes after the commit where latency is."""

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
    """Return the task that outboxes send."""

    @app.task(name="benchmarks.place", ignore_result=True)
    def place(number: int, note: str) -> None: ...

    return place


_tasks: dict[str, Any] = {}
_redis: dict[str, Any] = {}


def send(number: int, note: str) -> None:
    """Send a job. A function of a module, as jaiminho writes its name into the row."""
    _tasks["place"].delay(number, note=note)


def run(number: int, note: str) -> None:
    """Be a job that runs: where latency is measured (a number below 0 is none), say when."""
    if number < 0:
        return
    if not _redis:
        import redis

        _redis["client"] = redis.Redis.from_url(broker())
    _redis["client"].rpush(ARRIVED, number)
