"""What the tests of the archive share: archivers with and without Spark, and the books.

The books are kept without the code under test: the log is read by Django, the archive by pyarrow
from what the manifest's JSON names.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC
from pathlib import Path
from typing import Any

import pyarrow as pa
from django.db import connections, transaction
from pyarrow import parquet

from outbox_app import NewEvent, publish_many
from outbox_app.eventlog.window import TOMBSTONE
from outbox_app.failpoints import set_failpoint
from outbox_app.models import Event, EventLog
from outbox_app.pipeline.archiver import Archiver
from outbox_app.pipeline.driver.pipeline import log_options
from outbox_app.pipeline.options import Options
from outbox_app.pipeline.schema import COLUMNS

from .archiver import Here

#: The points of a batch at which a process may be killed, in order.
POINTS = (
    "archive_planned",
    "archive_copied",
    "archive_compared",
    "archive_committed",
    "archive_moved",
    "compaction_written",
)

Row = tuple[Any, ...]


class Killed(BaseException):
    """As if the process had ended here: nobody catches it."""


def source(alias: str, log: type[EventLog] = Event, **given: Any) -> Options:
    """Return the options with which the pipeline reads a log of this run."""
    password = str(connections[alias].settings_dict.get("PASSWORD") or "")
    options = log_options(log, using=alias, password=password)
    return replace(options, partitions=2, **{"connect_timeout": 2.0, **given})


def archive(alias: str, folder: Any, *, session: Any = None, rows: int = 4, **given: Any) -> int:
    """Archive what is committed by now. Returns how many events that was."""
    said: list[str] = []
    archiver = Archiver(
        session or Here(), source(alias, **given), str(folder), max_rows=rows, write=said.append
    )
    return archiver.run()


def publish_some(alias: str, count: int, *, streams: int = 3, **fields: Any) -> list[int]:
    """Publish events in a transaction. Returns their positions."""
    before = Event.objects.using(alias).order_by("-pk").values_list("pk", flat=True).first() or 0
    events = [NewEvent(f"order-{n % streams}", "placed", {"n": n}, **fields) for n in range(count)]
    with transaction.atomic(using=alias):
        publish_many(events, using=alias)
    found = Event.objects.using(alias).filter(pk__gt=before)
    return list(found.order_by("pk").values_list("pk", flat=True))


def logged(alias: str, log: type[EventLog] = Event) -> list[Row]:
    """Return the rows of a log, in order, as Django sees them."""
    rows = log.objects.using(alias).exclude(type=TOMBSTONE).order_by("pk")
    return [_row(row) for row in rows.values(*COLUMNS)]


def archived(folder: Any) -> list[Row]:
    """Return the rows of an archive, in order; a file that is not in its place is an error."""
    names = [file["name"] for entry in entries(folder) for file in entry["files"]]
    return rows_of(parquet.read_table(Path(folder, name), partitioning=None) for name in names)


def rows_of(tables: Iterable[pa.Table]) -> list[Row]:
    """Return the rows of tables, in order."""
    return sorted(_row(row) for table in tables for row in table.to_pylist())


def entries(folder: Any) -> list[dict[str, Any]]:
    """Return the entries of a manifest, in order."""
    found = (json.loads(path.read_text()) for path in Path(folder, "_manifest").glob("0*.json"))
    return sorted(found, key=lambda entry: entry["first"])


def leftovers(folder: Any) -> set[str]:
    """Return the files that no entry names, but for those that were put away."""
    named = {file["name"] for entry in entries(folder) for file in entry["files"]}
    return {
        name
        for name in tree(folder)
        if not name.startswith(("_manifest/0", "_replaced/")) and name not in named
    } - {"_lock", "_manifest/archive.json"}


def tree(folder: Any) -> dict[str, bytes]:
    """Return all files of a folder, and what they hold."""
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def assert_exact(alias: str, folder: Any) -> None:
    """The archive is the log, row for row, and nothing lies about."""
    rows, there = logged(alias), archived(folder)
    ids, positions = [row[0] for row in rows], [row[0] for row in there]
    assert set(ids) - set(positions) == set(), "lost"
    assert len(positions) == len(set(positions)), "doubled"
    assert there == rows
    assert leftovers(folder) == set()


class killing:
    """``with killing(point, 2):`` whoever passes the point for the second time is gone."""

    def __init__(self, point: str, at: int = 1) -> None:
        self.point, self.left = point, at

    def __enter__(self) -> killing:
        set_failpoint(self.point, self.act)
        return self

    def act(self) -> None:
        self.left -= 1
        if self.left == 0:
            raise Killed(self.point)

    def __exit__(self, kind: Any, *_: Any) -> bool:
        set_failpoint(self.point, None)
        return kind is Killed


def _row(values: dict[str, Any]) -> Row:
    data, metadata = values["data"], values["metadata"]
    values |= {
        "data": json.dumps(json.loads(data) if isinstance(data, str) else data, sort_keys=True),
        "metadata": json.dumps(
            json.loads(metadata) if isinstance(metadata, str) else metadata, sort_keys=True
        ),
        "message_id": str(values["message_id"]),
        "recorded_at": values["recorded_at"].astimezone(UTC),
    }
    return tuple(values[name] for name in COLUMNS)
