"""How much of a table a list reads: ``counting.MANY`` rows, the newest or those before an id.

A filter that matches few rows would make the database scan the whole table. So the filter is
applied inside a range of the primary key only, which one query along the index finds. The page
shows the range, and links to the rows before it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from uuid import UUID

from django.db.models import QuerySet

from ..models import counting


@dataclass(frozen=True, slots=True)
class RowRange:
    """A range of a column of integers, the primary key of most tables."""

    column: str
    #: The lowest value of the range, or None if no row lies below it.
    first: int | None
    #: The exclusive upper bound of the range, or None if it ends with the newest row.
    before: int | None
    #: The highest value, if PostgreSQL's planner needs it to see how small the range is.
    last: int | None = None

    @property
    def is_all(self) -> bool:
        return self.first is None and self.before is None

    def rows(self, rows: QuerySet[Any]) -> QuerySet[Any]:
        bounds = {"gte": self.first, "lt": self.before, "lte": self.last}
        known = {f"{self.column}__{name}": v for name, v in bounds.items() if v is not None}
        return rows.filter(**known)


def row_range(table: QuerySet[Any], *, column: str = "id", before: int | None = None) -> RowRange:
    """Return the range of the newest rows, or of those before a value, ``counting.MANY`` at most.

    ``table`` is all rows, or rows that an index returns in the order of the column.
    """
    rows = table if before is None else table.filter(**{f"{column}__lt": before})
    values = rows.order_by(f"-{column}").values_list(column, flat=True)
    edge = list(values[counting.MANY - 1 : counting.MANY + 1])
    first = edge[0] if len(edge) == 2 else None
    # Versions start anew in each stream, so the planner takes an open range for most of the table.
    last = None if column == "id" or first is None else values[0]
    return RowRange(column, first, before, last)


def number(text: str) -> int | None:
    """Return the id that an untrusted text stands for, or None if no row can have it."""
    # Check the length first: Python refuses to convert thousands of digits.
    if text.isascii() and text.isdecimal() and len(text) <= 19 and int(text) < 2**63:
        return int(text)
    return None


def id_in(text: str) -> UUID | None:
    try:
        return UUID(text)
    except ValueError:
        return None
