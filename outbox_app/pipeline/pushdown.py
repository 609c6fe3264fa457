"""Filters of a query that the database can apply: comparisons of a column with a value.

Such a filter means exactly the same on every database as in Spark. All others are left to Spark.
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

#: Ordered the same way everywhere. Text is not (collations differ): only its equality is taken.
_NUMBERS = {"id", "txid", "version", "slice"}
_TEXTS = {"topic", "stream", "type"}
_OPERATORS: dict[type[Filter], str] = {
    In: "IN",
    EqualTo: "=",
    GreaterThan: ">",
    GreaterThanOrEqual: ">=",
    LessThan: "<",
    LessThanOrEqual: "<=",
}


def condition(filter: Filter, database: Database) -> str | None:
    """Return a filter as SQL, or None if it is left to Spark."""
    operator = _OPERATORS.get(type(filter))
    attribute: tuple[str, ...] = getattr(filter, "attribute", ())
    if operator is None or len(attribute) != 1:
        return None
    [name], value = attribute, filter.value  # type: ignore[attr-defined]
    values = list(value) if operator == "IN" else [value]
    if not values or not all(_fits(name, each, database) for each in values):
        return None
    if name in _TEXTS and operator not in ("=", "IN"):
        return None
    literals = ", ".join(map(database.literal, values))
    return f"{name} IN ({literals})" if operator == "IN" else f"{name} {operator} {literals}"


def _fits(name: str, value: Any, database: Database) -> bool:
    if name in _NUMBERS:
        return type(value) is int
    if name in _TEXTS:
        return isinstance(value, str) and "\0" not in value
    if not database.compares_times or database.options.time_zone != "UTC":
        return False  # an hour may occur twice
    return name == "recorded_at" and isinstance(value, datetime) and value.tzinfo is not None
