"""Small files become large ones: an archive that follows a log makes a file every few seconds.

Batches that follow one another are put together, a file a day, under one entry in the place of
theirs. The new files are read again and compared with the old ones before that.
"""

from __future__ import annotations

from collections.abc import Iterator

import pyarrow as pa

from ..exceptions import ArchiveRefused
from ..failpoints import failpoint
from .manifest import Entry, File, Manifest
from .parquet import first_difference, read_checked, write_days

#: Batches of at least so many rows are left alone, and no more are put together.
ROWS = 500_000
#: So many small batches are put together.
BATCHES = 16


def compact(manifest: Manifest) -> Iterator[Entry]:
    """Put small batches together where enough of them follow one another.

    Args:
        manifest: Of the archive.

    Yields:
        The entries that were made.

    Raises:
        ArchiveRefused: A file is not as it was written.
    """
    for group in list(_groups(manifest.entries)):
        merged = _merge(manifest, group)
        failpoint("compaction_written")
        manifest.commit(merged)
        yield merged


def _groups(entries: list[Entry]) -> Iterator[list[Entry]]:
    group: list[Entry] = []
    rows = 0
    for entry in entries:
        if entry.rows * 2 > ROWS or rows + entry.rows > ROWS:
            if len(group) >= BATCHES:
                yield group
            group, rows = [], 0
        if entry.rows * 2 <= ROWS:
            group.append(entry)
            rows += entry.rows
    if len(group) >= BATCHES:
        yield group


def _merge(manifest: Manifest, group: list[Entry]) -> Entry:
    store = manifest.store
    first, last = group[0], group[-1]
    old = pa.concat_tables([read_checked(store, file) for entry in group for file in entry.files])
    old = old.sort_by("id")
    files = write_days(old.to_batches(), store, f"{first.first:08d}-{last.last:08d}")
    merged = Entry(
        first.first,
        last.last,
        first.start,
        last.end,
        sorted(files, key=lambda file: file.first),
        verified=min(entry.verified for entry in group),
    )
    new = pa.concat_tables([read_checked(store, _incoming(file)) for file in files])
    if first_difference(old, new) is not None:
        raise ArchiveRefused(
            f"Files of {store.folder} that were put together are not what they were made of: the "
            "disk is broken. The old ones are kept."
        )
    return merged


def _incoming(file: File) -> File:
    return File(file.incoming, file.rows, file.bytes, file.sha256, file.first, file.last)
