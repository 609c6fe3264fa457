"""Looks up whether rows of a log are in an archive, before retention deletes them.

A row counts as archived if a file of the table has its position and its message id. Each file is
read as a whole, and its hash must be the one in its name: a corrupt file is no reason to delete.
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
    from ..parquet import File
    from ..table import Archive


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
    """Looks up rows in an archive. Callers ask for rows in the order of their positions."""

    def __init__(self, folder: str, log: str) -> None:
        self._archive = load_archive(folder, log)
        self._files = self._archive.files()
        #: Of each file that was reached and is not passed: its last position, and ids by position.
        self._open: list[tuple[int, dict[int, str]]] = []

    def first(self, rows: Sequence[tuple[int, object]]) -> int:
        """Return how many are archived, up to one that is not. Raises as ``load_archive``."""
        if rows:
            self._reach(rows[0][0], rows[-1][0])
        for count, (position, message_id) in enumerate(rows):
            if not any(ids.get(position) == _plain(message_id) for _, ids in self._open):
                return count
        return len(rows)

    def _reach(self, first: int, last: int) -> None:
        self._open = [each for each in self._open if each[0] >= first]
        while self._files and self._files[0].first <= last:
            file = self._files.pop(0)
            if file.last >= first:
                self._open.append((file.last, _message_ids(self._archive, file)))


def _message_ids(archive: Archive, file: File) -> dict[int, str]:
    """Return the ids by position. Other columns of half a million events would fill the memory."""
    from ..parquet import read_checked
    from ..schema import arrow_types, some

    with _readable():
        table = read_checked(archive.store, file, arrow_types(some("id", "message_id")))
    ids = map(_plain, table["message_id"].to_pylist())
    return dict(zip(table["id"].to_pylist(), ids, strict=True))


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


def _plain(message_id: object) -> str:
    return str(message_id).replace("-", "")
