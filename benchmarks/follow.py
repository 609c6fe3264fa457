"""Spark beside the writers: how far behind the archive is, and a stream into a sink of one's own.

Writers as in ``writers``, at 16,000 rows a second for 100 seconds: once beside ``outbox_pipeline
archive --follow``, once beside a stream whose ``foreachBatch`` notes what it is given. Each has a
log of its own, and has read some rows before the clock starts. A row is archived when Delta has
committed its file, by the time in that commit.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
import time
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import django

from . import losses
from .books import Book, delivered, note, percentiles
from .keepup import growth
from .writers import write

RATE, SECONDS = 16_000, 100.0
LOG = "benchmark_event"
#: Seconds between two batches.
PAUSE = 1
TOLD = {"lost": "0", "duplicated": "0", "lag_growth": "at most 1.5"}
ASKED = {f"{name}_{what}": asked for name in ("archive", "stream") for what, asked in TOLD.items()}
#: Seconds without progress after which the rest is lost.
QUIET_SECONDS = 120.0


def run(*, scale: float = 1.0, quick: bool = False) -> dict[str, Any]:
    """Run both.

    Args:
        scale: Part of the time for which is written.
        quick: A fiftieth of it.

    Returns:
        ``ratios``, ``asked``, and ``rounds``, one for each: what was written, lag in seconds, and
        seconds from the last commit until nothing was left.
    """
    django.setup()
    seconds = SECONDS * (0.02 if quick else scale)
    with tempfile.TemporaryDirectory() as folder:
        table = f"{folder}/archive"
        rounds = [
            _beside("archive", partial(_archive, table), partial(_archived, table), seconds),
            _beside("stream", _stream, partial(delivered, "stream"), seconds),
        ]
    ratios = {f"{each['name']}_{what}": each[what] for each in rounds for what in TOLD}
    return {"ratios": ratios, "asked": ASKED, "rounds": rounds}


def _beside(
    name: str, read: Callable[[Any], None], count: Callable[[], int], seconds: float
) -> dict[str, Any]:
    """Write beside one of them."""
    with losses.scratch_database():
        with losses.reading({name: [read]}):
            first = write(rows_per_second=RATE, seconds=0.2)
            _wait(count, len(first.ids))
            written = write(rows_per_second=RATE, seconds=seconds)
            _wait(count, len(first.ids) + len(written.ids))
        if name == "archive":
            _note_commits(read.args[0])  # type: ignore[attr-defined]
        book = Book.read([first, written])
        verdict = book.judge(name)
        # Those of before waited for Spark to start.
        lags = [(at, lag) for at, lag in book.lags(name) if at > max(first.committed_at)]
    verdict["lag_seconds"] = percentiles(array("d", (lag for _, lag in lags)))
    print(
        f"{name}: wrote {written.summary['rows_per_second']:,} rows/s, lag "
        f"{verdict['lag_seconds']}, empty after {verdict['done_after_last_commit']} s",
        flush=True,
    )
    return {"name": name, **written.summary, **verdict, "lag_growth": growth(lags)}


def _wait(count: Callable[[], int], rows: int) -> None:
    """Wait until there are so many, or no more for a while."""
    before, moved = -1, time.monotonic()
    while (now := count()) < rows and time.monotonic() - moved < QUIET_SECONDS:
        if now != before:
            before, moved = now, time.monotonic()
        time.sleep(1)


def _archive(table: str, stop: Any) -> None:
    from django.core.management import call_command

    def end() -> None:
        stop.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end, daemon=True).start()
    given = ("--log", LOG, "--to", table, "--follow", "--interval", str(PAUSE))
    call_command("outbox_pipeline", "archive", *given)


def _archived(table: str) -> int:
    from deltalake import DeltaTable

    if not DeltaTable.is_deltatable(table):
        return 0
    rows: int = DeltaTable(table).history(1)[0]["outbox"]["rows"]
    return rows


def _note_commits(table: str) -> None:
    """Note of each batch what it has added, and when that was committed."""
    import pyarrow as pa
    import pyarrow.parquet
    from deltalake import DeltaTable

    from .models import Delivery

    batches, known = 0, set[str]()
    for commit in reversed(DeltaTable(table).history()):
        version = DeltaTable(table, version=commit["version"])
        paths = set(pa.table(version.get_add_actions())["path"].to_pylist())
        if commit["outbox"]["batches"] > batches:  # a compaction adds no rows
            batches = commit["outbox"]["batches"]
            for path in sorted(paths - known):
                ids = pyarrow.parquet.ParquetFile(f"{table}/{path}").read(["id"])["id"]
                packed = array("q", ids.to_pylist()).tobytes()
                at = commit["timestamp"] / 1000
                Delivery.objects.create(reader="archive", at=at, positions=packed)
        known |= paths


def _stream(stop: Any) -> None:
    from outbox_app.pipeline.driver.pipeline import pipeline

    def sink(frame: Any, _batch: int) -> None:
        note("stream", frame.select("id").toArrow()["id"].to_pylist())

    with pipeline(log=LOG) as run, tempfile.TemporaryDirectory() as checkpoint:
        log = run.session.readStream.format("outbox").options(**run.options.texts()).load()
        writer = log.writeStream.foreachBatch(sink).option("checkpointLocation", checkpoint)
        query = writer.trigger(processingTime=f"{PAUSE} seconds").start()
        while not stop.wait(PAUSE) and query.isActive:
            pass
        query.stop()
        if error := query.exception():
            raise error
