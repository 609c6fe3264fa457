"""Merges small files into large ones: an archive that follows a log makes files every few seconds.

Consecutive files of a day with the same columns are merged. The new file is read again, and has to
have the sum of the old rows, before a commit puts it in their place; the old ones are kept for a
week. delta-rs' own compaction writes no page checksums: damage in its files would go unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

import pyarrow as pa

from ..failpoints import failpoint
from .exceptions import ArchiveRefused
from .parquet import File, content_sum, read_checked, write_days

if TYPE_CHECKING:
    from .table import Archive

#: The most rows of a merged file …
ROWS = 500_000
#: … and its most bytes, compressed. Files of more than half of either are not merged.
BYTES = 128 * 2**20
#: The least number of files that are merged.
FILES = 16


def compact(archive: Archive) -> Iterator[File]:
    """Merge consecutive small files, if there are enough. Raises ``ArchiveRefused``."""
    for group in list(_groups(archive.files())):
        # What a column has that was added later is NULL in no older row: it is not there.
        alike: dict[pa.Schema, list[tuple[File, pa.Table]]] = {}
        for file in group:
            table = read_checked(archive.store, file)
            alike.setdefault(table.schema, []).append((file, table))
        for pairs in alike.values():
            if len(pairs) > 1:
                yield from _merged(archive, *zip(*pairs, strict=True))


def _merged(archive: Archive, old: Sequence[File], tables: Sequence[pa.Table]) -> list[File]:
    rows = pa.concat_tables(tables)
    prefix = f"{archive.mark.batches:08d}-merged"
    new = write_days(rows.to_batches(), archive.store, prefix, rows.schema)
    failpoint("compaction_written")
    found = sum(content_sum(read_checked(archive.store, file)) for file in new)
    if found % 2**128 != content_sum(rows):
        raise ArchiveRefused(
            f"Merged files of {archive.store.folder} differ from the files that they were "
            "made of: the disk is broken. The old files are kept."
        )
    archive.replace(old, new)
    return new


def _groups(files: list[File]) -> Iterator[list[File]]:
    for _, same in groupby(sorted(files, key=attrgetter("day", "first")), key=attrgetter("day")):
        group: list[File] = []
        for file in same:
            if _share(file) > 0.5 or _share(*group, file) > 1:
                yield from _worthwhile(group)
                group = []
            if _share(file) <= 0.5:
                group.append(file)
        yield from _worthwhile(group)


def _worthwhile(group: list[File]) -> Iterator[list[File]]:
    # A file that is much larger than all after it waits: else it is rewritten again and again.
    while group and _share(group[0]) > 2 * _share(*group[1:]):
        group = group[1:]
    if len(group) >= FILES:
        yield group


def _share(*files: File) -> float:
    """Return the size of files, as a part of the largest allowed."""
    rows = sum(file.rows for file in files)
    return max(rows / ROWS, sum(file.bytes for file in files) / BYTES)
