"""Ways to end a transaction from inside: ``end(way, alias)`` does, ``each_ending`` tries all."""

from __future__ import annotations

from contextlib import closing

import pytest
from django.db import connections

from tests.mysql import is_mysql

#: A statement that commits by itself on MariaDB, and changes nothing.
DDL = "DROP TABLE IF EXISTS outbox_never"
PROCEDURE = "BEGIN NOT ATOMIC COMMIT; END"

EACH = [
    pytest.param(alias, way, id=f"{name}-{word}")
    for alias, name in (("default", "sqlite"), ("postgres", "postgres"), ("mariadb", "mariadb"))
    for word, way in (
        ("commit", "COMMIT"),
        ("driver", ""),
        *([("ddl", DDL), ("procedure", PROCEDURE)] if alias == "mariadb" else []),
    )
]
#: Goes above a test that takes ``alias`` and ``way``.
each_ending = pytest.mark.parametrize(("alias", "way"), EACH, indirect=["alias"])


def end(way: str, alias: str) -> None:
    """Execute the statement ``way``, or let the driver commit."""
    if not way:
        connections[alias].connection.commit()
        return
    if way == PROCEDURE and is_mysql(alias):  # which has no block without a name
        with closing(connections.create_connection(alias)) as other, other.cursor() as cursor:
            cursor.execute("CREATE PROCEDURE IF NOT EXISTS outbox_ends() COMMIT")
        way = "CALL outbox_ends()"
    with connections[alias].cursor() as cursor:
        cursor.execute(way)
