"""A writer, to be killed: ``python -m benchmarks.soak.writer NAME SEED RATE LOG FAULTS``.

The writer runs one transaction after another, with jobs and events. It rolls some back, keeps some
open for seconds, and kills itself in some right after it has sent COMMIT. LOG is its history: each
transaction before it begins, outcome unknown, and when it has ended; its own faults; and with
immediate delivery how many jobs it has published itself.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import django

from outbox_app.history import Writer as History
from outbox_app.history.record import FAILED, UNKNOWN

#: A happening in the history of a writer that publishes its jobs itself.
PUBLISHED = "published by writers"
KEYS = [f"key-{n}" for n in range(20)]
STREAMS = [f"stream-{n}" for n in range(40)]


class RolledBack(Exception):
    """Raised to roll back a transaction or a savepoint on purpose."""


class Writer:
    """Runs the transactions; see the module.

    Args:
        name: The prefix of the numbers of its transactions.
        random: The generator of its random choices.
        history: Takes the records.
        faults: Names of the faults that it injects itself.
    """

    def __init__(
        self, name: str, random: random.Random, history: History, faults: set[str]
    ) -> None:
        self.name = name
        self.random = random
        self.history = history
        self.faults = faults
        self.count = 0

    def run_once(self) -> int:
        """Run one transaction. Returns how many jobs it was meant to stage."""
        from django.db import Error, OperationalError, connection, transaction

        from .models import Committed

        self.count += 1
        number = f"{self.name}-{self.count}"
        fate = self.random.random()
        rolls_back = fate < 0.08
        long = "long-transaction" in self.faults and 0.08 <= fate < 0.084
        dies = "killed-at-commit" in self.faults and 0.084 <= fate < 0.088
        jobs = 150 if self.random.random() < 0.01 else self.random.randint(0, 3)
        began = time.time()
        noted = partial(self.history.write, "transaction", id=number, began=began)
        noted(outcome=UNKNOWN)
        try:
            with transaction.atomic():
                Committed.objects.create(number=number)
                self._stage(number, jobs, keyed=not long)
                self._publish(number, long=long)
                self._undo_savepoint(number)
                if long:
                    self.history.write("happening", name="long-transaction")
                    time.sleep(self.random.uniform(5, 15))
                if transaction.get_rollback():  # the signal swallowed an error: see enter()
                    raise OperationalError("The books could not be kept.")
                if rolls_back:
                    raise RolledBack
                if dies:
                    self.history.write("happening", name="killed-at-commit")
                    _send_commit(connection.connection)
                    os.kill(os.getpid(), signal.SIGKILL)
        except RolledBack:
            noted(outcome=FAILED)
        except Error as error:
            noted(outcome=UNKNOWN, error=type(error).__name__)
            with suppress(Exception):  # closing a broken connection may raise any error
                connection.close()
            time.sleep(0.5)
        else:
            noted()
        return jobs

    def _stage(self, number: str, jobs: int, *, keyed: bool) -> None:
        from outbox_app import stage_many

        from .models import Key
        from .subscribers import effect

        known = [""] if not keyed or self.random.random() < 0.4 else self.random.sample(KEYS, 3)
        keys = [self.random.choice(known) for _ in range(jobs)]
        # Jobs staged under the lock of their key have a defined order: promise P7.
        for name in sorted({*keys} - {""}):
            Key.objects.select_for_update().get(name=name)
        calls = []
        for n, key in enumerate(keys):
            options: dict[str, Any] = {"task_id": f"{number}-{n}", "ordering_key": key}
            if not key and self.random.random() < 0.1:
                options["queue"] = "soak-fragile"
            elif not key and self.random.random() < 0.05:
                options["countdown"] = 3
            calls.append(options)
        if self.random.random() < 0.5:
            stage_many(effect.signature(**options) for options in calls)
        else:
            for options in calls:
                effect.apply_async(**options)

    def _publish(self, number: str, *, long: bool) -> None:
        from outbox_app.events import NewEvent, publish_many

        streams = [number] if long else self.random.sample(STREAMS, self.random.randint(0, 2))
        publish_many(NewEvent(stream, "soak.written", {"number": number}) for stream in streams)

    def _undo_savepoint(self, number: str) -> None:
        from django.db import transaction

        from .subscribers import effect

        if self.random.random() < 0.05:
            with suppress(RolledBack), transaction.atomic():
                effect.apply_async(task_id=f"{number}-undone")
                raise RolledBack


def _send_commit(raw: Any) -> None:
    """Send COMMIT without waiting for the answer."""
    if hasattr(raw, "pgconn"):
        raw.pgconn.send_query(b"COMMIT")
        while raw.pgconn.flush():
            pass
    else:
        raw.send_query("COMMIT")


def _note_published(history: History, count: int, **kwargs: Any) -> None:
    history.write("happening", name=PUBLISHED, count=count)


@contextmanager
def until_terminated() -> Any:
    """Yield a function that returns whether SIGTERM has arrived."""
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, frame: ended.append(number))
    yield lambda: bool(ended)


def main(name: str, seed: str, rate: str, log: str, faults: str) -> None:
    """Write until SIGTERM, ``rate`` jobs a second."""
    django.setup()
    from outbox_app.signals import jobs_published

    with until_terminated() as is_ended:
        history = History(Path(log), name)
        writer = Writer(name, random.Random(seed), history, set(faults.split(",")))
        published = partial(_note_published, history)
        jobs_published.connect(published)
        due = time.monotonic()
        while not is_ended():
            due += writer.run_once() / float(rate)
            # Do not make up for jobs that were missed while the database was away.
            due = max(due, time.monotonic() - 1)
            time.sleep(max(0.0, due - time.monotonic()))


if __name__ == "__main__":
    main(*sys.argv[1:])
