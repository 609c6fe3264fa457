"""Statistics of a log into the table that the admin shows: the last run's, and nothing else.

One transaction takes the old rows away and writes the new ones: readers see the old ones until it
commits, and a run that is killed has changed nothing. All is computed before it begins. It is
short, therefore: on PostgreSQL no subscription gets beyond a transaction that is still writing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from datetime import datetime
from itertools import chain, islice

from django.conf import settings
from django.db import transaction
from django.utils import timezone

from ...aliases import outbox_alias
from ...models import Statistic
from ...models.statistic import label_of
from ...models.upsert import upsert
from ..statistic_names import COLUMNS, NAMES

#: Rows an INSERT.
BATCH = 500

Row = tuple[str, datetime, str, str, str, float]


def store(rows: Iterable[Row], *, log: str, using: str | None = None) -> int:
    """Replace the statistics of a log in the table. Raises ``ValueError``."""
    using = using or outbox_alias()
    batches = _batches(rows, log)
    # The first row comes when all of them were computed, and only then the transaction begins.
    first = next(batches, [])
    written = 0
    with transaction.atomic(using=using):
        Statistic.objects.using(using).filter(source=log, name__in=NAMES).delete()
        for batch in chain([first], batches):
            _write(batch, using=using)
            written += len(batch)
    return written


def _batches(rows: Iterable[Row], log: str) -> Iterator[list[Statistic]]:
    made = (_statistic(row, log) for row in rows)
    while batch := list(islice(made, BATCH)):
        yield batch


def _statistic(row: Row, log: str) -> Statistic:
    source, minute, name, dimension, label, value = row
    if source != log:
        raise ValueError(
            f"A statistic of {source!r} was given as one of {log!r}. Store each log by itself."
        )
    return Statistic(
        source=source,
        minute=_stored(minute),
        name=name,
        dimension=dimension,
        label=label_of(label),
        value=value,
    )


def _stored(minute: datetime) -> datetime:
    if settings.USE_TZ:
        return minute
    return timezone.make_naive(minute, timezone.get_default_timezone())


def _write(batch: list[Statistic], *, using: str) -> None:
    # Two runs at a time: rows of the other one, which were not there to be deleted, are updated.
    table = Statistic.objects.using(using)
    upsert(table, batch, update=["value", "written_at"], unique=COLUMNS[:-1])
