"""SQL for MySQL and MariaDB alike: a table of numbers, and the plan of a statement."""

from __future__ import annotations

from typing import Any

from django.db import connections


def numbers(first: int, last: int, name: str) -> str:
    """Return a table of whole numbers, in brackets: MariaDB alone has sequences."""
    digits = " UNION ALL ".join(f"SELECT {digit} AS d" for digit in range(10))
    places = range(len(str(last - first)))
    tables = ", ".join(f"({digits}) AS d{place}" for place in places)
    sum = " + ".join([str(first), *(f"d{place}.d * {10**place}" for place in places)])
    return f"(SELECT {sum} AS {name} FROM {tables} HAVING {name} <= {last})"


def explain(sql: str) -> str:
    return f"EXPLAIN FORMAT=TRADITIONAL {sql}"


def plan_of(cursor: Any) -> list[dict[str, Any]]:
    """Return the rows of an ``explain()``, which are longer on MySQL, by their columns' names."""
    names = [column[0] for column in cursor.description]
    return [dict(zip(names, row, strict=True)) for row in cursor.fetchall()]


def is_mysql(alias: str) -> bool:
    """Say whether MARIADB_URL names a server of MySQL."""
    connection: Any = connections[alias]
    return connection.vendor == "mysql" and not connection.mysql_is_mariadb
