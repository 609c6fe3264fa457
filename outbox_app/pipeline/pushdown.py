"""Filters of a query that the database can do: comparisons of a column with a value.

A filter that is taken has exactly Spark's meaning on every database; all others are left to Spark.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any

from pyspark.sql.datasource import (
    EqualTo,
    Filter,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    LessThan,
    LessThanOrEqual,
)

from .database import Database

#: Ordered the same way everywhere. Of text only equality is: collations order it otherwise.
_NUMBERS = {"id", "txid", "version", "slice"}
_TEXTS = {"topic", "stream", "type"}
_OPERATORS: dict[type[Filter], str] = {
    EqualTo: "=",
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
    LessThan: "<",
    LessThanOrEqual: "<=",
}


def condition(filter: Filter, database: Database) -> str | None:
    """Return a filter as SQL, or None where it is left to Spark."""
    attribute: tuple[str, ...] = getattr(filter, "attribute", ())
    if len(attribute) != 1:
        return None
    [name] = attribute
    if (
        isinstance(filter, In)
        and filter.value
        and all(_fits(name, value, database) for value in filter.value)
    ):
        values = ", ".join(database.literal(value) for value in filter.value)
        return f"{name} IN ({values})"
    operator = _OPERATORS.get(type(filter))
    if operator is None or not _fits(name, filter.value, database):  # type: ignore[attr-defined]
        return None
    if name in _TEXTS and operator != "=":
        return None
    return f"{name} {operator} {database.literal(filter.value)}"  # type: ignore[attr-defined]


def _fits(name: str, value: Any, database: Database) -> bool:
    if name in _NUMBERS:
        return type(value) is int
    if name in _TEXTS:
        return isinstance(value, str) and "\0" not in value
    if not database.compares_times or database.options.time_zone != "UTC":
        return False  # an hour may be there twice
    return name == "recorded_at" and isinstance(value, datetime) and value.tzinfo is not None
