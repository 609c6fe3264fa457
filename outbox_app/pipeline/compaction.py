"""Small files become large ones: an archive that follows a log makes files every few seconds.

Files of a day that follow one another are put together. The new file is read again and compared
with the old ones before it is committed in their place; the old ones are kept for a week.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from operator import attrgetter
from typing import TYPE_CHECKING

from ..exceptions import ArchiveRefused
from ..failpoints import failpoint
from .parquet import File, first_difference, read_all, write_days

if TYPE_CHECKING:
    from .table import Archive

#: Most rows that are put together …
ROWS = 500_000
#: … and most bytes, compressed. Files of more than half of either are left alone.
BYTES = 128 * 2**20
#: So many small files are put together.
FILES = 16


def compact(archive: Archive) -> Iterator[File]:
    """Put small files together where enough follow one another. Raises ``ArchiveRefused``."""
    for group in list(_groups(archive.files())):
        old = read_all(archive.store, group, archive.schema)
        prefix = f"{archive.mark.batches:08d}-merged"
        new = write_days(old.to_batches(), archive.store, prefix, archive.schema)
        failpoint("compaction_written")
        if first_difference(old, read_all(archive.store, new, archive.schema)) is not None:
            raise ArchiveRefused(
                f"Files of {archive.store.folder} that were put together are not what they were "
                "made of: the disk is broken. The old ones are kept."
            )
        archive.replace(group, new)
        yield from new


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
    # What is much larger than all that follows waits: it would be written again and again.
    while group and _share(group[0]) > 2 * _share(*group[1:]):
        group = group[1:]
    if len(group) >= FILES:
        yield group


def _share(*files: File) -> float:
    """Return the part of the largest file that these fill."""
    rows = sum(file.rows for file in files)
    return max(rows / ROWS, sum(file.bytes for file in files) / BYTES)
