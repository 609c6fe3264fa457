"""The tables of a database, looked up as its server compares their names.

SQLite, and MySQL with ``lower_case_table_names``, ignore the case of a name. Such a MySQL lists all
names in lower case, also where a model's ``db_table`` has capitals.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import django.db
from django.db import connections


def as_compared(name: str, connection: Any) -> str:
    """Return a table's name in a form that is equal for all names of the table."""
    return name.lower() if connection.features.ignores_table_name_case else name


class Tables:
    """The tables that there are: ``"Account" in Tables(connection)``."""

    def __init__(self, connection: Any) -> None:
        self.connection = connection
        names: Iterable[str] = connection.introspection.table_names()
        self._names = {as_compared(name, connection) for name in names}

    def __contains__(self, name: str) -> bool:
        return as_compared(name, self.connection) in self._names


def is_hidden(table: str, using: str) -> bool:
    """Return whether there may be a table that is not listed.

    MySQL and MariaDB list no table on which the user has no privilege, and deny that it is missing.
    """
    connection: Any = connections[using]
    if connection.vendor != "mysql":
        return False
    try:
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT 1 FROM {connection.ops.quote_name(table)} LIMIT 0")
    except django.db.Error as error:
        if error.args[:1] not in [(1142,), (1146,)]:  # denied; no such table
            raise
        return bool(error.args[0] == 1142)
    return True
