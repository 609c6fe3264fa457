"""Columns of text that every database compares byte by byte.

PostgreSQL and SQLite do so by themselves. On MySQL and MariaDB a server's default collation calls
two keys equal that differ only in case or in a trailing space, and its default character set may be
latin1. These fields name utf8mb4 and a collation that compares bytes there. Do not move the module
or rename its classes: migrations refer to them by path, those of projects with own logs, too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from django.db import models

__all__ = ["CharField", "TextField"]


def exact_collation(connection: Any) -> str | None:
    """Return the collation of these fields on MySQL or MariaDB; None for any other database."""
    if connection.vendor != "mysql":
        return None
    return "utf8mb4_nopad_bin" if connection.mysql_is_mariadb else "utf8mb4_0900_bin"


def _compared(parameters: Any, connection: Any) -> Any:
    """Add the collation to the parameters of a column; one that the field names stays."""
    return parameters | {"collation": parameters["collation"] or exact_collation(connection)}


if TYPE_CHECKING:  # Django's classes cannot be subscripted when the code runs
    from django.db.models import CharField as CharField
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
