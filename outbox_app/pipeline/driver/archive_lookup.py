"""Reads archives for Django: compares rows before retention deletes them, and returns versions.

Rows are compared with those of the archive in the transaction that deletes them, and are locked
until its end: no session changes a row between the comparison and its removal.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from typing import TYPE_CHECKING, Any

from django.db import connections
from django.db.models import DurationField, Field, GenericIPAddressField, JSONField

from ..exceptions import NoSpark, Unreachable
from .rebuild_fold import as_stored

if TYPE_CHECKING:
    from ...events.models import EventLog
    from ..table import Archive

#: How many rows are read and compared at first …
ROWS = 100
#: … and about how many bytes from then on, but at most so many rows. A row may have a megabyte.
BYTES = 8_000_000
MOST = 1_000


def load_archive(folder: str, log: str) -> Archive:
    """Return an archive, without Spark. Raises ``NoSpark``, ``ArchiveRefused``, ``Unreachable``."""
    try:
        from ..table import Archive
    except ImportError as error:
        raise NoSpark(
            f"Reading an archive needs pyarrow and deltalake, and {error.name} cannot be "
            "imported: pip install 'outbox-app[spark]'."
        ) from error
    with _readable():
        return Archive.load(folder, log)


def archived_versions(log: type[EventLog], id: str, *, folder: str, using: str) -> list[Any]:
    """Return the versions of a stream in an archive as rows of the log, the oldest first."""
    archive = load_archive(folder, log._meta.db_table)
    from ..parquet import read_stream

    with _readable():
        rows = read_stream(archive.store, archive.files(), archive.schema.names, id)
    found = []
    for row in rows:
        values = {
            field.attname: _python_value(field, row[field.column], connections[using])
            for field in log._meta.concrete_fields
            if field.column in row
        }
        version = log(**values)
        version._state.adding, version._state.db = False, using
        found.append(version)
    return found


class ArchiveLookup:
    """Compares rows of a log with its archive. See ``events.archives.Lookup``.

    Raises as ``load_archive``.
    """

    def __init__(self, folder: str, log: type[EventLog], *, using: str) -> None:
        archive = load_archive(folder, log._meta.db_table)
        from .comparison import ArchivedRows, compared
        from .through_django import LogThroughDjango

        self._archived, self._rows = ArchivedRows(archive), ROWS
        logged = LogThroughDjango(log, using=using)
        self._logged = logged.rows
        self._schema, self.left_out = compared(logged.database.schema(), archive.schema)

    def first(self, ids: Sequence[int], *, lock: bool) -> tuple[int, str]:
        done = 0
        while chunk := ids[done : done + self._rows]:
            with _readable():
                equal, others = self._compared(chunk, lock)
            for id in chunk:
                if id not in equal:
                    return done, others.get(id, "")
                done += 1
        return done, ""

    def _compared(self, ids: Sequence[int], lock: bool) -> tuple[set[int], dict[int, str]]:
        from .comparison import compare

        equal: set[int] = set()
        others: dict[int, str] = {}
        size = 0
        for logged in self._logged(ids, self._schema, lock=lock):
            size += logged.nbytes
            others |= dict.fromkeys(logged["id"].to_pylist(), "is not archived")
            for archived in self._archived.of(logged["id"]):
                same, differing = compare(logged, archived)
                equal.update(same)
                others |= differing
        self._rows = max(1, min(MOST, BYTES * len(ids) // (size or 1)))
        return equal, others


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise Unreachable(
            f"The archive cannot be read: {error}. This process needs permission to read its "
            "folder, and all files in it."
        ) from error


def _python_value(field: Field[Any, Any], value: Any, connection: Any) -> Any:
    if isinstance(field, JSONField):
        return None if value is None else json.loads(value, cls=field.decoder)
    if isinstance(value, datetime):
        value = as_stored(value, connection)
    elif isinstance(field, DurationField) and isinstance(value, int):
        value = timedelta(microseconds=value)
    elif isinstance(field, GenericIPAddressField) and value:
        value = value.partition("/")[0]  # PostgreSQL appends a mask
    elif value and str(kind := field.db_type(connection)).endswith(("]", "range")):
        with connection.cursor() as cursor:  # only PostgreSQL can parse its text of these
            cursor.execute(f"SELECT %s::{kind}", [value])
            [value] = cursor.fetchone()
    return field.to_python(value)
