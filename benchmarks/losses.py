"""Lost rows: three readers of one log while it is written, side by side in one run.

The load is that of the article that reported 1,371 of 2,200,000 events lost: 6,000 rows a second,
then 16,000, for 100 seconds each, commits delayed at random, 32 parallel readers by slice.

- ``naive``: reads by time, up to a second ago
- ``completeness``: reads by time as well, and looks for versions that are missing in a stream
- ``window``: a subscription with default options, and 32 partitions

Each reader has its own processes, which compete with the writers for the machine: the achieved rate
is part of the result. When the writers have finished, every reader may catch up.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import django

from . import naive
from .books import Book, delivered, note
from .writers import Written, write

ASKED = {"window_lost": "0", "window_duplicated": "0", "window_inverted": "0"}
#: Rows per second, and the seconds of the phase.
PHASES = ((6_000, 100), (16_000, 100))
PARTITIONS = 32
#: A reader that receives nothing for so many seconds after the last commit is done. The default is
#: longer than completeness waits between two searches; the naive reader does not search.
QUIET = {"naive": 4.0}
QUIET_SECONDS = 20.0


def run(*, scale: float = 1.0, quick: bool = False) -> dict[str, Any]:
    """Run the phases.

    Args:
        scale: Fraction of the time for which the writers write.
        quick: Write for a hundredth of the time.

    Returns:
        ``ratios``, ``asked``, ``written`` (the achieved rates of each phase) and ``readers``.
    """
    django.setup()
    phases = [(rate, seconds * (0.01 if quick else scale)) for rate, seconds in PHASES]
    with scratch_database():
        return contest(phases, contestants())


def contestants() -> dict[str, list[Callable[[Any], None]]]:
    """Return for each reader the functions that its processes run."""
    from outbox_app.events.subscriptions.subscriber import Subscriber

    found: dict[str, list[Callable[[Any], None]]] = {"naive": [naive.run]}
    if "by_time" in Subscriber.__dataclass_fields__:
        found["completeness"] = [subscription("completeness", by_time=True, on_gap="park")] * 2
    return {**found, "window": [subscription("window")] * 2}


def subscription(name: str, **options: Any) -> Callable[[Any], None]:
    """Return a function that runs a subscription as ``manage.py run_subscriptions`` does."""

    def run(stop: Any) -> None:
        from outbox_app.events.subscriptions.runner import Runner
        from outbox_app.events.subscriptions.subscriber import subscriber, subscriber_named

        from .models import TimedEvent

        @subscriber(name, **{"logs": [TimedEvent], "partitions": PARTITIONS, **options})
        def handle(events: list[Any]) -> None:
            note(name, [event.id for event in events])

        runner = Runner([subscriber_named(name)], interval=naive.INTERVAL)
        threading.Thread(target=lambda: (stop.wait(), runner.stop()), daemon=True).start()
        runner.run()

    return run


def contest(
    phases: list[tuple[float, float]], readers: dict[str, list[Callable[[Any], None]]]
) -> dict[str, Any]:
    """Write while the readers read; then compare the deliveries to each with the committed rows."""
    written: list[Written] = []
    with reading(readers):
        for rate, seconds in phases:
            written.append(write(rows_per_second=rate, seconds=seconds))
            print(f"asked for {rate:,.0f} rows/s: {written[-1].summary}", flush=True)
        wait_until_done(list(readers), sum(len(each.ids) for each in written))
    book = Book.read(written)
    verdicts = {name: book.judge(name) for name in readers}
    for name, verdict in verdicts.items():
        print(f"{name:14} {verdict}", flush=True)
    window = verdicts["window"]
    return {
        "ratios": {f"window_{what}": window[what] for what in ("lost", "duplicated", "inverted")},
        "asked": ASKED,
        "written": [
            {"asked_rows_per_second": rate, **each.summary}
            for (rate, _), each in zip(phases, written, strict=True)
        ],
        "readers": verdicts,
    }


@contextmanager
def scratch_database(alias: str = "default") -> Iterator[None]:
    """Work in a new scratch database, or in that of an enclosing ``scratch_database`` block."""
    from django.db import connections

    connection = connections[alias]
    name = connection.settings_dict["NAME"]
    if name == connection.creation._get_test_db_name():
        yield
        return
    connection.creation.create_test_db(verbosity=0, autoclobber=True)
    try:
        yield
    finally:
        connection.close()
        ours, connection.settings_dict["NAME"] = connection.settings_dict["NAME"], name
        _drop(connection, ours)


def _drop(connection: Any, name: str) -> None:
    if connection.vendor == "sqlite":
        Path(name).unlink()
        return
    force = "" if connection.vendor == "mysql" else "WITH (FORCE)"
    with connection.cursor() as cursor:
        cursor.execute(f"DROP DATABASE {name} {force}")


@contextmanager
def reading(readers: dict[str, list[Callable[[Any], None]]]) -> Iterator[None]:
    """Run the processes of the readers."""
    from django.db import connections

    connections.close_all()
    context = get_context("fork")
    stop = context.Event()
    processes = [
        context.Process(target=_reader, args=(each, stop), name=name, daemon=True)
        for name, targets in readers.items()
        for each in targets
    ]
    for process in processes:
        process.start()
    try:
        yield
    finally:
        stop.set()
        for process in processes:
            process.join(60)
            if process.is_alive():
                process.kill()
    if failed := [process.name for process in processes if process.exitcode]:
        raise RuntimeError(f"Readers that ended with an error: {', '.join(failed)}.")


def _reader(run: Callable[[Any], None], stop: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    run(stop)


def wait_until_done(
    readers: list[str],
    committed: int,
    *,
    count: Callable[[str], int] = delivered,
    quiet: float = QUIET_SECONDS,
) -> None:
    """Wait until every reader has received all rows, or nothing more for a while."""
    before: dict[str, int] = {}
    moved = {name: time.monotonic() for name in readers}
    while open_ := [name for name in readers if before.get(name) != committed]:
        for name in open_:
            now = count(name)
            if now != before.get(name):
                before[name], moved[name] = now, time.monotonic()
        if all(time.monotonic() - moved[n] > QUIET.get(n, quiet) for n in open_):
            break
        time.sleep(1)
