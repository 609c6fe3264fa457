"""Counts with a limit: a page does not take longer because a table has more rows.

Rows are counted up to a limit, by the index that the query uses, and lists are cut.
"""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet

#: The number of rows at which counting stops.
MANY = 100_000
#: The number of rows at which a list ends.
LISTED = 50


def counted(rows: QuerySet[Any], *, limit: int | None = None) -> int:
    """Return the number of rows, or one more than the limit (MANY) if there are more."""
    return rows.order_by()[: (MANY if limit is None else limit) + 1].count()


def shown_count(count: int) -> str:
    """Return a count as text: ``100000+`` if counting stopped."""
    return f"{MANY}+" if count > MANY else str(count)


def newest(rows: QuerySet[Any], *, limit: int | None = None) -> tuple[QuerySet[Any], bool]:
    """Return the newest rows, by id, up to the limit (MANY), and whether there are more."""
    limit = MANY if limit is None else limit
    past = list(rows.order_by("-id").values_list("id", flat=True)[limit : limit + 1])
    return (rows.filter(id__gt=past[0]), True) if past else (rows, False)
