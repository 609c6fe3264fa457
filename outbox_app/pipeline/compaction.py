"""Small files become large ones: an archive that follows a log makes a file every few seconds.

Batches that follow one another are put together after an hour, a file a day, under one entry in the
place of theirs. The new files are read again and compared with the old ones before that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import takewhile

import pyarrow as pa

from ..exceptions import ArchiveRefused
from ..failpoints import failpoint
from .manifest import Entry, File, Manifest
from .parquet import ARROW, first_difference, read_checked, write_days
from .store import Store

#: Most rows that are put together …
ROWS = 500_000
#: … and most bytes, compressed. Batches of more than half of either are left alone.
BYTES = 128 * 2**20
#: So many small batches are put together.
BATCHES = 16
#: Younger ones are left alone, so that a reader up to the end of one finds that end again.
SECONDS = 3600


def compact(manifest: Manifest) -> Iterator[Entry]:
    """Put small batches together where enough of them follow one another.

    Raises ``ArchiveRefused``.
    """
    for group in list(_groups(manifest.entries)):
        merged = _merge(manifest, group)
        failpoint("compaction_written")
        manifest.commit(merged)
        yield merged


def _groups(entries: list[Entry]) -> Iterator[list[Entry]]:
    group: list[Entry] = []
    old = time.time() - SECONDS
    for entry in takewhile(lambda entry: entry.verified <= old, entries):
        if _share(entry) > 0.5 or _share(*group, entry) > 1:
            yield from _worthwhile(group)
            group = []
        if _share(entry) <= 0.5:
            group.append(entry)
    yield from _worthwhile(group)


def _worthwhile(group: list[Entry]) -> Iterator[list[Entry]]:
    # What is much larger than all that follows waits: it would be written again and again.
    while group and _share(group[0]) > 2 * _share(*group[1:]):
        group = group[1:]
    if len(group) >= BATCHES:
        yield group


def _share(*entries: Entry) -> float:
    """Return the part of the largest file that these fill."""
    rows = sum(entry.rows for entry in entries)
    size = sum(file.bytes for entry in entries for file in entry.files)
    return max(rows / ROWS, size / BYTES)


def _merge(manifest: Manifest, group: list[Entry]) -> Entry:
    store = manifest.store
    first, last = group[0], group[-1]
    old = _rows(store, [file for entry in group for file in entry.files])
    files = write_days(old.to_batches(), store, f"{first.first:08d}-{last.last:08d}")
    merged = Entry(
        first.first,
        last.last,
        first.start,
        last.end,
        sorted(files, key=lambda file: file.first),
        verified=min(entry.verified for entry in group),
    )
    if first_difference(old, _rows(store, merged.files)) is not None:
        raise ArchiveRefused(
            f"Files of {store.folder} that were put together are not what they were made of: the "
            "disk is broken. The old ones are kept."
        )
    return merged


def _rows(store: Store, files: Sequence[File]) -> pa.Table:
    return pa.concat_tables([ARROW.empty_table(), *(read_checked(store, file) for file in files)])
