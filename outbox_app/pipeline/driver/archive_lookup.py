"""Which rows of a log are in an archive, as retention has to know it before they go.

A row counts as archived when a file of the table holds its position and its message id; what is
committed was compared with the log, row by row. Each file is read as a whole first and has to have
the hash of its name: what has rotted on disk is no reason to delete a row.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from django.db.models import Field, JSONField

from ...exceptions import NoSpark
from ...models import EntityVersion

if TYPE_CHECKING:
    from ..table import Archive


def load_archive(folder: str, log: str) -> Archive:
    """Return an archive, read without Spark. Raises ``NoSpark``, ``ArchiveRefused``."""
    try:
        from ..table import Archive
    except ImportError as error:
        raise NoSpark(
            f"Reading an archive needs pyarrow and deltalake, and {error.name} cannot be "
            "imported: pip install 'outbox-app[spark]'."
        ) from error
    return Archive.load(folder, log)


def archived_versions(
    log: type[EntityVersion], id: str, *, folder: str, using: str
) -> list[EntityVersion]:
    """Return the versions of an entity that an archive has, the oldest first."""
    archive = load_archive(folder, log._meta.db_table)
    from ..parquet import read_stream

    found = []
    for row in read_stream(archive.store, archive.files(), archive.schema.names, id):
        values = {
            field.attname: _python_value(field, row[field.column])
            for field in log._meta.concrete_fields
            if field.column in row
        }
        version = log(**values)
        version._state.adding, version._state.db = False, using
        found.append(version)
    return found


class ArchiveLookup:
    """The rows of an archive, asked for in the order of their positions."""

    def __init__(self, folder: str, log: str) -> None:
        self._archive = load_archive(folder, log)
        self._files = self._archive.files()
        #: Of the files whose positions have been reached and not passed yet.
        self._open: dict[str, tuple[int, dict[int, str]]] = {}

    def first(self, rows: Sequence[tuple[int, object]]) -> int:
        """Return how many of the rows are archived, up to the first that is not.

        Raises ``ArchiveRefused``.
        """
        known = self._between(rows[0][0], rows[-1][0]) if rows else {}
        for count, (position, message_id) in enumerate(rows):
            if known.get(position) != _plain(message_id):
                return count
        return len(rows)

    def _between(self, first: int, last: int) -> dict[int, str]:
        """Return the rows of all files that may hold some of these positions."""
        self._open = {name: each for name, each in self._open.items() if each[0] >= first}
        while self._files and self._files[0].first <= last:
            file = self._files.pop(0)
            if file.last < first:
                continue
            table = self._archive.read(file)
            ids = map(_plain, table["message_id"].to_pylist())
            rows = dict(zip(table["id"].to_pylist(), ids, strict=True))
            self._open[file.name] = (file.last, rows)
        known: dict[int, str] = {}
        for _, rows in self._open.values():
            known |= rows
        return known


def _python_value(field: Field[Any, Any], value: Any) -> Any:
    if isinstance(field, JSONField):
        return None if value is None else json.loads(value, cls=field.decoder)
    return field.to_python(value)


def _plain(message_id: object) -> str:
    return str(message_id).replace("-", "")
