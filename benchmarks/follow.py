"""Spark beside the writers: the lag of the archive, and of a stream into a sink of one's own.

The writers (see ``writers``) write 16,000 rows a second for 100 seconds: once beside
``outbox_pipeline archive --follow``, once beside a stream whose ``foreachBatch`` records its rows.
Each of the two has its own log, and reads some rows before the measurement starts. A row counts as
archived at the time of the Delta commit that adds its file.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from array import array
from collections.abc import Callable, Iterator
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
#: After so many seconds without progress the missing rows are lost. Spark takes long to start.
QUIET_SECONDS = 120.0


def run(*, scale: float = 1.0, quick: bool = False) -> dict[str, Any]:
    """Run both.

    Args:
        scale: Fraction of the time for which the writers write.
        quick: Write for a fiftieth of the time.

    Returns:
        ``ratios``, ``asked``, and ``rounds``, one for each reader: the rows written, the lag in
        seconds, and the seconds from the last commit to the last delivery.
    """
    django.setup()
    seconds = SECONDS * (0.02 if quick else scale)
    with tempfile.TemporaryDirectory() as folder:
        archive = _beside(
            "archive",
            partial(_archive, folder),
            seconds,
            count=lambda _: _archived(folder),
            settle=lambda: _note_commits(folder),
        )
    rounds = [archive, _beside("stream", _stream, seconds)]
    ratios = {f"{each['name']}_{what}": each[what] for each in rounds for what in TOLD}
    return {"ratios": ratios, "asked": ASKED, "rounds": rounds}


def _beside(
    name: str,
    read: Callable[[Any], None],
    seconds: float,
    *,
    count: Callable[[str], int] = delivered,
    settle: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Write beside one reader; return the rows written and the reader's lag."""
    wait = partial(losses.wait_until_done, [name], count=count, quiet=QUIET_SECONDS)
    with losses.scratch_database():
        with losses.reading({name: [read]}):
            first = write(rows_per_second=RATE, seconds=0.2)
            wait(len(first.ids))
            written = write(rows_per_second=RATE, seconds=seconds)
            wait(len(first.ids) + len(written.ids))
        settle()
        book = Book.read([first, written])
        verdict = book.judge(name)
        ready = max(first.committed_at)  # the rows of ``first`` waited for Spark to start
        lags = [(at, lag) for at, lag in book.lags(name) if at > ready]
    verdict["lag_seconds"] = percentiles(array("d", (lag for _, lag in lags)))
    print(
        f"{name}: wrote {written.summary['rows_per_second']:,} rows/s, lag "
        f"{verdict['lag_seconds']}, empty after {verdict['done_after_last_commit']} s",
        flush=True,
    )
    return {"name": name, **written.summary, **verdict, "lag_growth": growth(lags)}


def _archive(folder: str, stop: Any) -> None:
    from django.core.management import call_command

    def end() -> None:
        stop.wait()
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=end, daemon=True).start()
    given = ("--log", LOG, "--to", folder, "--follow", "--interval", str(PAUSE))
    call_command("outbox_pipeline", "archive", *given)


def _archived(folder: str) -> int:
    from deltalake import DeltaTable

    from outbox_app.pipeline.table import Archive

    return Archive.load(folder, LOG).rows if DeltaTable.is_deltatable(folder) else 0


def _note_commits(folder: str) -> None:
    from .models import Delivery

    for at, ids in batches(folder):
        packed = array("q", ids).tobytes()
        Delivery.objects.create(reader="archive", at=at, positions=packed)


def batches(folder: str) -> Iterator[tuple[float, list[int]]]:
    """Yield for each batch of an archive the time of its commit, and the positions it added."""
    import pyarrow as pa
    import pyarrow.parquet
    from deltalake import DeltaTable

    count, known = 0, set[str]()
    for commit in reversed(DeltaTable(folder).history()):
        table = DeltaTable(folder, version=commit["version"])
        paths = set(pa.table(table.get_add_actions())["path"].to_pylist())
        if commit["outbox"]["batches"] > count:  # a compaction adds no rows
            count = commit["outbox"]["batches"]
            files = (pyarrow.parquet.ParquetFile(f"{folder}/{p}") for p in sorted(paths - known))
            ids = [id for file in files for id in file.read(["id"])["id"].to_pylist()]
            yield commit["timestamp"] / 1000, ids
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
