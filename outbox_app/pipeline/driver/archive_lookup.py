"""Which rows of a log are in an archive, as retention has to know it before they go.

A row counts as archived when a file of the manifest holds its position and its message id; all
entries of a manifest were compared with the log, row by row. Each file is read as a whole first and
has to have the checksum of its entry: what has rotted on disk is no reason to delete a row.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ...exceptions import ArchiveRefused, NoSpark

if TYPE_CHECKING:
    from ..manifest import File, Manifest


class ArchiveLookup:
    """The rows of an archive, asked for in the order of their positions."""

    def __init__(self, folder: str, log: str) -> None:
        try:
            from ..manifest import Manifest
            from ..store import Store
        except ImportError as error:
            raise NoSpark(
                f"Reading an archive needs pyarrow, and {error.name} cannot be imported: pip "
                "install 'outbox-app[spark]'."
            ) from error
        self._manifest = Manifest.load(Store(folder), log)
        self._files = _in_order(self._manifest)
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
        from ..parquet import read_checked

        self._open = {name: each for name, each in self._open.items() if each[0] >= first}
        while self._files and self._files[0].first <= last:
            file = self._files.pop(0)
            if file.last < first:
                continue
            try:
                table = read_checked(self._manifest.store, file)
            except ArchiveRefused:
                self._manifest = self._manifest.again()
                if file in self._manifest.files():
                    raise
                # It was put together with others meanwhile.
                self._files, self._open = _in_order(self._manifest), {}
                continue
            ids = map(_plain, table["message_id"].to_pylist())
            rows = dict(zip(table["id"].to_pylist(), ids, strict=True))
            self._open[file.name] = (file.last, rows)
        known: dict[int, str] = {}
        for _, rows in self._open.values():
            known |= rows
        return known


def _in_order(manifest: Manifest) -> list[File]:
    return sorted(manifest.files(), key=lambda file: file.first)


def _plain(message_id: object) -> str:
    return str(message_id).replace("-", "")
