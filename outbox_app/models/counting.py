"""Counting that ends: no answer takes longer because more rows are there.

Rows are counted up to a limit, through the index that the query names; lists are cut. What is shown
says so: ``100000+``.
"""

from __future__ import annotations

from typing import Any

from django.db.models import QuerySet

#: Counting stops here.
MANY = 100_000
#: Lists end here.
LISTED = 50


def counted(rows: QuerySet[Any], *, limit: int | None = None) -> int:
    """Return how many rows there are, or one more than the limit (MANY) where there are more."""
    return rows.order_by()[: (MANY if limit is None else limit) + 1].count()


def shown_count(count: int) -> str:
    """Return a count for people: ``100000+`` where counting stopped."""
    return f"{MANY}+" if count > MANY else str(count)


def newest(rows: QuerySet[Any], *, limit: int | None = None) -> tuple[QuerySet[Any], bool]:
    """Return the newest of these rows, by id, up to the limit (MANY), and if there are more."""
    limit = MANY if limit is None else limit
    past = list(rows.order_by("-id").values_list("id", flat=True)[limit : limit + 1])
    return (rows.filter(id__gt=past[0]), True) if past else (rows, False)
