"""Small files become large ones: an archive that follows a log makes a file every few seconds.

Batches that follow one another are put together after an hour, a file a day, under one entry in the
place of theirs. The new files are read again and compared with the old ones before that.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import takewhile

from ..exceptions import ArchiveRefused
from ..failpoints import failpoint
from .manifest import Entry, Manifest
from .parquet import first_difference, read_all, write_days

#: Most rows that are put together …
ROWS = 500_000
#: … and most bytes, compressed. Batches of more than half of either are left alone.
BYTES = 128 * 2**20
#: So many small batches are put together.
BATCHES = 16
#: Younger ones are left alone, so that a reader up to the end of one finds that end again.
SECONDS = 3600


def compact(manifest: Manifest) -> Iterator[Entry]:
    """Put small batches together where enough follow one another. Raises ``ArchiveRefused``."""
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
    old = read_all(store, [file for entry in group for file in entry.files])
    files = write_days(old.to_batches(), store, f"{first.first:08d}-{last.last:08d}")
    files.sort(key=lambda file: file.first)
    verified = min(entry.verified for entry in group)
    merged = Entry(first.first, last.last, first.start, last.end, files, verified)
    if first_difference(old, read_all(store, merged.files)) is not None:
        raise ArchiveRefused(
            f"Files of {store.folder} that were put together are not what they were made of: the "
            "disk is broken. The old ones are kept."
        )
    return merged
