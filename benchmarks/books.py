"""The harness: compares every delivered row with every committed row.

There is no sampling. A ``lost`` row was committed and never delivered. A lost row counts among the
``tails`` if no later version of its stream was delivered, so that the reader cannot notice that it
is missing. A ``duplicated`` row was delivered again, an ``inverted`` one after a later version of
its stream, and a ``phantom`` was delivered without having been committed.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass
from typing import Any

from .writers import Written

CHUNK = 50_000


def note(reader: str, positions: list[int]) -> None:
    """Record the positions delivered to a reader, in the open transaction."""
    from .models import Delivery

    packed = array("q", positions).tobytes()
    Delivery.objects.create(reader=reader, at=time.time(), positions=packed)


@dataclass
class Book:
    """The committed rows, by position. Stream 0 means that there is no row at this position."""

    stream: array[int]
    version: array[int]
    committed_at: array[float]
    streams: int = 0

    @classmethod
    def read(cls, written: list[Written]) -> Book:
        """Read the table, and check that it holds the rows that the writers have committed.

        Raises:
            RuntimeError: It does not: the harness is broken, or the database has lost a commit.
        """
        from .models import TimedEvent

        rows = TimedEvent.objects.order_by("-id").values_list("id", flat=True)
        size = max([rows.first() or 0, *(max(w.ids, default=0) for w in written)]) + 1
        book = cls(*(array(code, bytes(8 * size)) for code in ("q", "q", "d")))
        numbers: dict[str, int] = {}
        found = rows.reverse().values_list("id", "stream", "version")
        last, count = 0, 0
        while chunk := list(found.filter(id__gt=last)[:CHUNK]):
            for id, stream, version in chunk:
                book.stream[id] = numbers.setdefault(stream, len(numbers) + 1)
                book.version[id] = version
            last, count = chunk[-1][0], count + len(chunk)
        book.streams = len(numbers)
        for each in written:
            for id, at in zip(each.ids, each.committed_at, strict=True):
                book.committed_at[id] = at
        known = sum(len(each.ids) for each in written)
        if known != count or any(not book.stream[id] for each in written for id in each.ids):
            raise RuntimeError(f"The writers committed {known} rows; the table holds {count}.")
        return book

    def judge(self, reader: str) -> dict[str, Any]:
        """Return how many rows a reader has lost, duplicated and inverted, and its lag."""
        from .models import Delivery

        seen = bytearray(len(self.stream))
        latest = array("q", bytes(8 * (self.streams + 1)))
        lags = array("d")
        last = 0.0
        duplicated = inverted = phantoms = 0
        pages = Delivery.objects.filter(reader=reader).order_by("id")
        for at, packed in pages.values_list("at", "positions").iterator():
            for id in array("q", bytes(packed)):
                stream = self.stream[id] if id < len(seen) else 0
                if not stream:
                    phantoms += 1
                    continue
                if seen[id]:
                    duplicated += 1
                    continue
                seen[id], last = 1, at
                if self.version[id] < latest[stream]:
                    inverted += 1
                else:
                    latest[stream] = self.version[id]
                lags.append(max(0.0, at - self.committed_at[id]))
        missing = [id for id, stream in enumerate(self.stream) if stream and not seen[id]]
        tails = sum(self.version[id] > latest[self.stream[id]] for id in missing)
        return {
            "delivered": len(lags),
            "lost": len(missing),
            "tails": tails,
            "duplicated": duplicated,
            "inverted": inverted,
            "phantoms": phantoms,
            "lag_seconds": percentiles(lags),
            "done_after_last_commit": round(max(0.0, last - max(self.committed_at)), 1),
            "gaps": gaps(reader),
        }

    def lags(self, reader: str) -> list[tuple[float, float]]:
        """Return when each row was committed, and how many seconds later it was delivered."""
        from .models import Delivery

        pages = Delivery.objects.filter(reader=reader).values_list("at", "positions")
        return [
            (self.committed_at[id], max(0.0, at - self.committed_at[id]))
            for at, packed in pages.iterator()
            for id in array("q", bytes(packed))
        ]


def delivered(reader: str) -> int:
    """Return how many positions were delivered to a reader."""
    from django.db.models import Sum
    from django.db.models.functions import Length

    from .models import Delivery

    pages = Delivery.objects.filter(reader=reader)
    return (pages.aggregate(n=Sum(Length("positions")))["n"] or 0) // 8


def gaps(reader: str) -> dict[str, int]:
    """Return how many gaps a subscription has noticed in streams, by their states."""
    from django.db.models import Count

    from outbox_app.events.models import Gap

    found = Gap.objects.filter(subscription=reader, kind=Gap.Kind.VERSION)
    return dict(found.values_list("state").annotate(Count("id")))


def percentiles(values: array[float]) -> dict[str, float]:
    ordered = sorted(values)
    if not ordered:
        return {}
    at = {"median": 0.5, "p99": 0.99, "max": 1.0}
    return {
        name: round(ordered[min(int(part * len(ordered)), len(ordered) - 1)], 3)
        for name, part in at.items()
    }
