"""Decisions on many rows: a person decides on a million, and a web server gives it 30 seconds.

Rows are looked at in the order of a column that has an index, ``STEP`` rows of the table at a
time, whether they match or not, so that no look is long. Those that match are decided on in
batches, each a transaction of its own. A run ends when its time is over, between two batches, and
says where the next one resumes. It always does something: without time it does one batch, or one
look. A batch that the database refused because of another one's is done anew. A run that is stopped
in between leaves whole batches.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from operator import itemgetter
from typing import Any

from django.db import OperationalError, connections
from django.db.models import F, QuerySet
from django.db.models.functions import Length

from ..exceptions import OutboxError
from ..models import DatabaseNow
from ..process.lock_wait import is_conflict
from .drain.batch import BUDGET_BYTES
from .staging.insert import chunks

#: Rows of one transaction, at most. One that holds large messages ends earlier.
BATCH_SIZE = 500
#: Rows of the table in one look.
STEP = 5000
#: How often a batch is tried while others' hold it up.
ATTEMPTS = 5
#: A time by the database's clock: as it was, or as it is when a statement asks for it.
Moment = datetime | DatabaseNow
#: Before every value of a column.
START = -(2**63)


@dataclass(frozen=True, slots=True)
class BulkResult:
    """What a run has done, and where the next one resumes."""

    done: int
    #: Everything up to this value of the column is decided on. None: everything is.
    after: int | None
    #: Why it stopped before its time. The batches before are done.
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
    batch_size: int | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> BulkResult:
    """Decide on rows of a table of jobs, in the order of an indexed column, for so many seconds.

    ``act`` decides on the rows with these ids in one transaction, and returns how many it were.
    ``until`` is the highest id that belongs to the decision, ``after`` the place where the run
    before has ended. ``whole``: the rows are few, and found by an index: look at all at once.
    """
    end = clock() + seconds
    done = 0
    while True:
        edge = None if whole else _edge(rows, order, after)
        found = _look(rows, order, after, edge, until)
        rows_at_once = batch_size or BATCH_SIZE
        batches = [*chunks(found, rows=rows_at_once, bytes=BUDGET_BYTES, size=itemgetter(2))]
        # Not past rows with the same value; those that are done do not match any more.
        places = [*(batch[0][0] - 1 for batch in batches[1:]), edge]
        for batch, place in zip(batches or [[]], places, strict=True):
            for attempt in range(1, ATTEMPTS + 1):
                try:
                    done += act([id for _, id, _ in batch]) if batch else 0
                    break
                except (OutboxError, OperationalError) as error:
                    # Another one's batch and this one waited for each other, say.
                    again = is_conflict(error) and not connections[rows.db].in_atomic_block
                    if attempt == ATTEMPTS or not again or clock() >= end:
                        return BulkResult(done, after, error)
            if place is None or clock() >= end:
                return BulkResult(done, place)
            after = place


def up_to(until: int, rows: QuerySet[Any], order: str) -> QuerySet[Any]:
    """Return those of the rows whose id is not above ``until``, for a look along another index.

    MariaDB would rather read the table by its primary key.
    """
    plain: QuerySet[Any] = rows.alias(plain_id=F("id") + 0)
    return rows.filter(id__lte=until) if order == "id" else plain.filter(plain_id__lte=until)


def _edge(rows: QuerySet[Any], order: str, after: int) -> int | None:
    """Return where a look ends; None: it goes to the end of the table."""
    table = rows.model._default_manager.using(rows.db).filter(**{f"{order}__gt": after})
    values = table.order_by(order).values_list(order, flat=True)
    return next(iter(values[STEP - 1 : STEP]), None)


def _look(
    rows: QuerySet[Any], order: str, after: int, edge: int | None, until: int
) -> list[tuple[int, int, int]]:
    """Return of each row its value in the order, its id and its size."""
    part = up_to(until, rows, order).filter(**{f"{order}__gt": after})
    if edge is not None:
        part = part.filter(**{f"{order}__lte": edge})
    sizes = part.annotate(bytes=Length("body") + Length("envelope"))
    return list(sizes.order_by(order, "id").values_list(order, "id", "bytes"))
