"""What a commit of an archive says: how far the log is archived, and what each day has.

The sums of a day are additive: they stay the same when its files are merged, and grow with each
batch. Commits are deleted after a month, except the newest, so each repeats what is still needed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from .offset import Offset
from .parquet import File

#: Rows of a day, and the sum of their hashes (``content_sum``) in hexadecimal.
Day = list[Any]


@dataclass(frozen=True, slots=True)
class Mark:
    """The state of the archive, as a commit records it."""

    log: str
    #: The offset up to which the log is archived, in JSON.
    end: str
    #: The number of batches and of rows up to there.
    batches: int = 0
    rows: int = 0
    #: What was read from the database of each day of which it still has rows.
    days: Mapping[str, Day] = field(default_factory=dict)

    @classmethod
    def load(cls, values: Any) -> Mark:
        """Return the mark in a commit's metadata. Raises ``TypeError``, ``DamagedCursor``."""
        mark = cls(**values)
        Offset.load(mark.end)
        if type(mark.batches) is not int or type(mark.rows) is not int:
            raise TypeError(f"batches and rows are {mark.batches!r:.50} and {mark.rows!r:.50}")
        try:
            numbers = [(type(rows) is int, int(total, 16)) for rows, total in mark.days.values()]
        except (AttributeError, TypeError, ValueError):
            numbers = [(False, 0)]
        if not all(number for number, _ in numbers):
            raise TypeError(f"days are {mark.days!r:.50}")
        return mark

    def after(self, files: Iterable[File], end: Offset, since: str, there: Collection[str]) -> Mark:
        """Return the mark after a batch.

        Args:
            files: The files of the batch.
            end: The offset at which it ends.
            since: The first day that is kept, as ``YYYY-MM-DD``: earlier ones have left the log.
            there: The days that have files. One of them that is not kept stays so: what a late
                commit adds to it is a part of it.
        """
        days = {day: each for day, each in self.days.items() if day >= since}
        left = set(there) - days.keys()
        rows = 0
        for file in files:
            rows += file.rows
            if file.day not in left:
                days[file.day] = added(days.get(file.day, [0, "0"]), file.rows, file.sum)
        return replace(
            self, end=end.text, batches=self.batches + 1, rows=self.rows + rows, days=days
        )


def added(day: Day, rows: int, total: int) -> Day:
    """Return a day with more rows, whose hashes have this sum."""
    return [day[0] + rows, f"{(int(day[1], 16) + total) % 2**128:x}"]
