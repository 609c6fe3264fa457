"""A program: two commits that are late by force, and what the benchmark's harness says of it.

``python -m tests.benchmarks.late_commit`` prints the verdicts on the naive reader, on a
subscription, and on readers that repeat and turn round what they were given. The database is the
one of the benchmarks.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import django

from benchmarks.writers import Written, insert
from tests.patience import patience

written = Written()


def main() -> dict[str, Any]:
    """Return the verdicts."""
    from benchmarks import losses, naive
    from benchmarks.books import Book, note
    from benchmarks.models import TimedEvent
    from outbox_app.events.subscriptions.runner import Runner
    from outbox_app.events.subscriptions.subscriber import subscriber, subscriber_named

    naive.BEHIND = 0  # the commit is late by a whole page: no need to wait for a second

    @subscriber("window", logs=[TimedEvent], partitions=2)
    def handle(events: list[Any]) -> None:
        note("window", [event.id for event in events])

    def read() -> None:
        reader.run_once()
        Runner([subscriber_named("window")]).run(once=True)

    with losses.scratch_database():
        reader = naive.NaiveReader(1, 0)
        with committing_late("followed", "last"):
            commit("other")
            read()
        first, second = commit("followed"), commit("followed")
        read()
        note("broken", [*first, *first, *second, *first])
        note("turned", [*second, *first])
        book = Book.read([written])
        return {name: book.judge(name) for name in ("naive", "window", "broken", "turned")}


def commit(*streams: str) -> list[int]:
    """Write an event for each stream, in one transaction that commits at once."""
    from django.db import transaction

    from benchmarks.models import TimedEvent

    with transaction.atomic():
        ids = insert(list(streams), len(streams), log=TimedEvent)
    enter(ids)
    return ids


@contextmanager
def committing_late(*streams: str) -> Iterator[None]:
    """Have an event for each stream written before the block, and committed after it."""
    from django.db import connection, transaction

    from benchmarks.models import TimedEvent

    wrote, go = threading.Event(), threading.Event()

    def write() -> None:
        with transaction.atomic():
            ids = insert(list(streams), len(streams), log=TimedEvent)
            wrote.set()
            go.wait()
        enter(ids)
        connection.close()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    if not wrote.wait(patience()):
        raise RuntimeError("The late transaction has not written its rows.")
    try:
        yield
    finally:
        go.set()
        thread.join()


def enter(ids: list[int]) -> None:
    """Enter what was committed into the books."""
    written.ids.extend(ids)
    written.committed_at.extend([time.time()] * len(ids))


if __name__ == "__main__":
    os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.settings"
    django.setup()
    print(json.dumps(main()))
