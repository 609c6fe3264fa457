"""Converts tables on MySQL and MariaDB to utf8mb4, with keys that are compared byte by byte.

A server's default character set may be latin1, and its default collations call two keys equal that
differ only in case or in a trailing space. On other databases this does nothing. Do not move the
module or ``convert``: migrations refer to them by path, those of projects with own logs, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

#: Collations that compare byte by byte, trailing spaces included: MariaDB's and MySQL's.
COLLATIONS = {True: "utf8mb4_nopad_bin", False: "utf8mb4_0900_bin"}


def compare_bytes(*tables: str) -> Any:
    """Return the function for a ``RunPython`` operation that converts these tables.

    On MySQL an ALTER TABLE commits by itself, so give the operation ``atomic=False``.

    Args:
        tables: The names of the tables.
    """
    return partial(convert, tables)  # not a closure: squashmigrations serialises it


def convert(tables: Sequence[str], apps: Any, schema_editor: Any) -> None:
    connection = schema_editor.connection
    if connection.vendor == "mysql":
        collation = COLLATIONS[connection.mysql_is_mariadb]
        for table in tables:
            schema_editor.execute(
                f"ALTER TABLE {schema_editor.quote_name(table)} "
                f"CONVERT TO CHARACTER SET utf8mb4 COLLATE {collation}"
            )
