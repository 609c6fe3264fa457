"""Columns of text and JSON that are the same on every database.

Texts are compared byte by byte. PostgreSQL and SQLite do so by themselves. On MySQL and MariaDB a
server's default collation calls two keys equal that differ only in case or in a trailing space, and
its default character set may be latin1. These fields name utf8mb4 and a collation that compares
bytes there. Do not move the module or rename its classes: migrations refer to them by path, those
of projects with own logs, too.

JSON is read as it was written. MySQL's own type makes floats of integers beyond 64 bits, so there
it is a text that the server checks, as on MariaDB and SQLite. Why not refuse such numbers: see
docs/explanation/log-on-mysql.md.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import models
from django.db.models.fields.json import JSONExact

__all__ = ["CharField", "JSONField", "TextField"]


def exact_collation(connection: Any) -> str | None:
    """Return the collation of these fields on MySQL or MariaDB; None for any other database."""
    if connection.vendor != "mysql":
        return None
    return "utf8mb4_nopad_bin" if connection.mysql_is_mariadb else "utf8mb4_0900_bin"


def has_own_json(connection: Any) -> bool:
    """Return whether a database has MySQL's type of JSON."""
    return connection.vendor == "mysql" and not connection.mysql_is_mariadb


def _compared(parameters: Any, connection: Any) -> Any:
    """Add the collation to the parameters of a column; one that the field names stays."""
    return parameters | {"collation": parameters["collation"] or exact_collation(connection)}


if TYPE_CHECKING:  # Django's classes cannot be subscripted when the code runs
    from django.db.models import CharField as CharField
    from django.db.models import JSONField as JSONField
    from django.db.models import TextField as TextField
else:

    class CharField(models.CharField):
        """Django's ``CharField``, for keys: on every database only equal texts are equal."""

        def db_parameters(self, connection):
            return _compared(super().db_parameters(connection), connection)

    class TextField(models.TextField):
        """Django's ``TextField``: on every database only equal texts are equal."""

        def db_parameters(self, connection):
            return _compared(super().db_parameters(connection), connection)

    class JSONField(models.JSONField):
        """Django's ``JSONField``: every database returns the numbers that it was given."""

        def db_type(self, connection):
            return "longtext" if has_own_json(connection) else super().db_type(connection)

        def db_check(self, connection):
            if has_own_json(connection):
                return f"JSON_VALID({connection.ops.quote_name(self.column)})"
            return super().db_check(connection)

        def db_parameters(self, connection):
            parameters = super().db_parameters(connection)
            if has_own_json(connection):
                parameters["collation"] = exact_collation(connection)
            return parameters

    @JSONField.register_lookup
    class _Exact(JSONExact):
        def process_lhs(self, compiler, connection):
            sql, params = super().process_lhs(compiler, connection)
            return f"CAST({sql} AS JSON)" if has_own_json(connection) else sql, params
