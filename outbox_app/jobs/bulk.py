"""Decisions on many rows: a person may select a million, and a web request has 30 seconds.

A run reads the table in the order of an indexed column, ``STEP`` rows at a time whether they match
or not, so that no query is long. The matching rows are decided on in batches, each a transaction of
its own. The run ends between two batches when its time is over, and returns the place where the
next run resumes. Even without time it does one batch, or reads one step. A batch that conflicted
with another transaction is tried again. A run that is killed leaves whole batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from typing import Any

from django.db import connections
from django.db.models import F, QuerySet
from django.db.models.functions import Length

from ..database.clock import DatabaseNow
from ..database.lock_wait import is_conflict
from .drain.batch import BUDGET_BYTES
from .staging.insert import chunks

#: The most rows of one transaction. A batch of large messages has fewer.
BATCH_SIZE = 500
#: Rows of the table that one query covers.
STEP = 5000
#: How often a batch is tried while it conflicts with other transactions.
ATTEMPTS = 5
#: A time by the database's clock: a value read before, or the time at which a statement runs.
Moment = datetime | DatabaseNow
#: Lower than every value of the column.
START = -(2**63)


@dataclass(frozen=True, slots=True)
class BulkResult:
    """What a run has done, and where the next one resumes."""

    done: int
    #: All rows up to this value of the column are decided on. None: all rows of the table are.
    after: int | None
    #: The error that stopped the run before its time was over. The earlier batches are done.
    error: Exception | None = None


def run_for(
    rows: QuerySet[Any],
    act: Callable[[list[int]], int],
    *,
    order: str,
    until: int,
    after: int = START,
    seconds: float = float("inf"),
    whole: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> BulkResult:
    """Decide on rows of a table of jobs, in the order of an indexed column, for ``seconds``.

    ``act`` decides on the rows with the given ids in one transaction, and returns their number.
    ``until`` is the highest id that belongs to the decision; ``after`` is the place where the
    previous run ended. ``whole``: the rows are few and an index finds them; read all at once.
    """
    end = clock() + seconds
    done = 0
    while True:
        edge = None if whole else _edge(rows, order, after)
        found = _look(rows, order, after, edge, until)
        batches = [*chunks(found, rows=BATCH_SIZE, bytes=BUDGET_BYTES, size=itemgetter(2))]
        # A value may span two batches, so resume before it. Rows that are done no longer match.
        places = [*(batch[0][0] - 1 for batch in batches[1:]), edge]
        for batch, place in zip(batches or [[]], places, strict=True):
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    done += act([id for _, id, _ in batch]) if batch else 0
                    break
                except Exception as error:
                    # A deadlock with another transaction, for example.
                    again = is_conflict(error) and not connections[rows.db].in_atomic_block
                    if attempt == ATTEMPTS or not again or clock() >= end:
                        return BulkResult(done, after, error)
            if place is None or clock() >= end:
                return BulkResult(done, place)
            after = place


def _edge(rows: QuerySet[Any], order: str, after: int) -> int | None:
    """Return the last value that the next query covers; None: it covers the rest of the table."""
    table = rows.model._default_manager.using(rows.db).filter(**{f"{order}__gt": after})
    values = table.order_by(order).values_list(order, flat=True)
    return next(iter(values[STEP - 1 : STEP]), None)


def _look(
    rows: QuerySet[Any], order: str, after: int, edge: int | None, until: int
) -> list[tuple[int, int, int]]:
    """Return the value of ``order``, the id and the size of each matching row."""
    # A plain condition on the id would let MariaDB read the table by its primary key.
    ids = {"id__lte": until} if order == "id" else {"plain_id__lte": until}
    part = rows.alias(plain_id=F("id") + 0).filter(**ids, **{f"{order}__gt": after})
    if edge is not None:
        part = part.filter(**{f"{order}__lte": edge})
    sizes = part.annotate(bytes=Length("body") + Length("envelope"))
    return list(sizes.order_by(order, "id").values_list(order, "id", "bytes"))
