"""What the tests of the archive share: archivers with and without Spark, and the books.

The books are kept without the code under test: the log is read by Django, the archive by pyarrow
from what the JSON of the Delta log names.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC
from pathlib import Path
from typing import Any

import pyarrow as pa
from django.db import connections, transaction
from pyarrow import parquet

from outbox_app.events import NewEvent, publish_many
from outbox_app.events.log.window import TOMBSTONE
from outbox_app.events.models import Event, EventLog
from outbox_app.failpoints import set_failpoint
from outbox_app.pipeline.archiver import Archiver
from outbox_app.pipeline.driver.pipeline import log_options
from outbox_app.pipeline.options import Options
from outbox_app.pipeline.schema import COLUMNS
from outbox_app.pipeline.table import Archive

from .local_context import LocalContext

#: The points of a batch at which a process may be killed, in order.
POINTS = (
    "archive_planned",
    "archive_copied",
    "archive_counted",
    "archive_committed",
    "compaction_written",
    "archive_done",
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
        session or LocalContext(),
        source(alias, **given),
        str(folder),
        max_rows=rows,
        write=said.append,
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
    return rows_of(parquet.read_table(Path(folder, n), partitioning=None) for n in named(folder))


def rows_of(tables: Iterable[pa.Table]) -> list[Row]:
    """Return the rows of tables, in order."""
    return sorted(_row(row) for table in tables for row in table.to_pylist())


def commits(folder: Any) -> list[list[dict[str, Any]]]:
    """Return the actions of each commit of the table, in order."""
    paths = sorted(Path(folder, "_delta_log").glob("0*.json"))
    return [list(map(json.loads, path.read_text().splitlines())) for path in paths]


def entries(folder: Any) -> list[dict[str, Any]]:
    """Return the batches, in order: what their commits say, with the names and rows of files."""
    found, before = [], 0
    for actions in commits(folder):
        [info] = [each["commitInfo"] for each in actions if "commitInfo" in each]
        said = info["outbox"]
        if said["batches"] > len(found):
            files = [each["add"] for each in actions if "add" in each]
            names = [(each["path"], json.loads(each["stats"])["numRecords"]) for each in files]
            rows, before = said["rows"] - before, said["rows"]
            found.append({**said, "end": json.loads(said["end"]), "rows": rows, "files": names})
    return found


def named(folder: Any) -> list[str]:
    """Return the files of the table as it is now."""
    names: dict[str, None] = {}
    for actions in commits(folder):
        for action in actions:
            if "remove" in action:
                del names[action["remove"]["path"]]
            if "add" in action:
                names[action["add"]["path"]] = None
    return list(names)


def leftovers(folder: Any) -> set[str]:
    """Return the files that no commit names."""
    known = {
        (action.get("add") or action["remove"])["path"]
        for actions in commits(folder)
        for action in actions
        if action.keys() & {"add", "remove"}
    }
    return {name for name in tree(folder) if not name.startswith("_delta_log/")} - known


def age(folder: Any, days: float = 8) -> None:
    """Have all files of the table look so many days older, as vacuum goes by their times."""
    then = time.time() - days * 86400
    for name in tree(folder):
        if not name.startswith("_delta_log/"):
            os.utime(Path(folder, name), (then, then))


def tree(folder: Any) -> dict[str, bytes]:
    """Return all files of a folder, and what they hold."""
    paths = [path for path in Path(folder).rglob("*") if path.is_file()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in paths}


def assert_exact(alias: str, folder: Any, log: type[EventLog] = Event) -> None:
    """The archive is the log, row for row, and what was left by killed processes can go."""
    rows, there = logged(alias, log), archived(folder)
    ids, positions = [row[0] for row in rows], [row[0] for row in there]
    assert set(ids) - set(positions) == set(), "lost"
    assert len(positions) == len(set(positions)), "doubled"
    assert there == rows
    if leftovers(folder):
        age(folder)
        Archive.load(str(folder), log._meta.db_table).vacuum()
        assert leftovers(folder) == set()
        assert archived(folder) == rows


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
