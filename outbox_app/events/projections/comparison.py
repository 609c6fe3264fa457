"""Compares the live table with the shadow table: the changes that a rebuild would make.

Both tables are read in one snapshot. A row with an event that only one table has applied counts as
different: let the subscription catch up first. Columns with the time of writing (``auto_now``) are
not compared.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from django.db import connections, models, transaction
from django.db.models import BinaryField, Func

#: How many rows of each table are shown.
EXAMPLES = 3


def compare(
    live: type[models.Model], shadow: type[models.Model], *, using: str
) -> tuple[dict[str, int], list[str]]:
    """Compare two tables with the same columns. Return numbers of rows, and lines for people.

    The numbers: ``rows`` that the shadow has, ``old`` rows that only the live table has, and
    ``new`` rows that only the shadow has. A changed row counts as old and as new.
    """
    vendor, fields = connections[using].vendor, filter(_is_compared, live._meta.concrete_fields)
    names: list[Any] = [field.attname for field in fields]
    if vendor == "mysql":  # its collations treat different bytes as equal
        names = [_Bytes(name, output_field=BinaryField()) for name in names]
    before, after = (
        model._base_manager.using(using).order_by().values_list("pk", *names)
        for model in (live, shadow)
    )
    old, new = before.difference(after), after.difference(before)
    with transaction.atomic(using=using):
        if vendor != "sqlite":
            with connections[using].cursor() as cursor:
                cursor.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        counts = {"rows": after.count(), "old": old.count(), "new": new.count()}
        examples = [*_examples("old", live, old, using), *_examples("new", shadow, new, using)]
    return counts, examples


def _examples(
    kind: str, model: type[models.Model], differing: models.QuerySet[Any, Any], using: str
) -> Iterator[str]:
    # In the order of the key, so that a changed row is likely to be shown before and after.
    keys = [row[0] for row in differing.order_by("pk")[:EXAMPLES]]
    for row in model._base_manager.using(using).filter(pk__in=keys).order_by("pk").values():
        yield " ".join([kind, *(f"{name}={value!r:.80}" for name, value in row.items())])


class _Bytes(Func):
    template = "CAST(%(expressions)s AS BINARY)"


def _is_compared(field: Any) -> bool:
    written = getattr(field, "auto_now", False) or getattr(field, "auto_now_add", False)
    return not (field.primary_key or field.generated or written)
