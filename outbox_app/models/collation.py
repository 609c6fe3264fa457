"""Tables on MySQL and MariaDB: utf8mb4, and keys compared byte by byte.

A server's default character set may be latin1, and its default collations call two keys equal that
differ in case or in a trailing space only. Elsewhere this does nothing. Migrations, of projects
with logs of their own too, refer to this module and to ``convert`` by path: they stay here.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

#: Byte by byte, trailing spaces included.
COLLATIONS = {True: "utf8mb4_nopad_bin", False: "utf8mb4_0900_bin"}


def compare_bytes(*tables: str) -> Any:
    """Return the code of a ``RunPython`` that converts tables.

    On MySQL a change of a table commits by itself, so give the operation ``atomic=False``.

    Args:
        tables: Their names.
    """
    return partial(convert, tables)  # no closure: squashmigrations writes it out


def convert(tables: Sequence[str], apps: Any, schema_editor: Any) -> None:
    connection = schema_editor.connection
    if connection.vendor == "mysql":
        collation = COLLATIONS[connection.mysql_is_mariadb]
        for table in tables:
            schema_editor.execute(
                f"ALTER TABLE {schema_editor.quote_name(table)} "
                f"CONVERT TO CHARACTER SET utf8mb4 COLLATE {collation}"
            )
