"""Connections to PostgreSQL that share what ADBC reads of its catalog.

For each connection ADBC reads the types of all columns of all tables, which takes a hundred times
as long as to connect. The tests connect thousands of times, to the same few databases.
"""

from __future__ import annotations

from typing import Any

from adbc_driver_manager import AdbcConnection, dbapi
from adbc_driver_postgresql import connect
from adbc_driver_postgresql import dbapi as postgres

#: What was read, by address. It holds no connection, so a forked process may have it, too.
_databases: dict[str, Any] = {}


def share() -> None:
    """Let each connection of this process, and of those that it forks, find the types there."""
    postgres.connect = _connect


def _connect(uri: str, *, autocommit: bool) -> dbapi.Connection:
    if uri not in _databases:
        _databases[uri] = dbapi._SharedDatabase(connect(uri))
    database = _databases[uri]
    return dbapi.Connection(database, AdbcConnection(database._db), autocommit=autocommit)
