"""Copies of PostgreSQL servers: a dump restored into another server, and a hot standby."""

from __future__ import annotations

import os
from typing import Any

from .postgres import PostgreSQL, _program


class Standby(PostgreSQL):
    """A hot standby of a private server, by streaming replication.

    Args:
        primary: A running server.
    """

    ready_text = "ready to accept read-only connections"

    def __init__(self, primary: PostgreSQL, **options: Any) -> None:
        super().__init__(**options)
        self.primary = primary

    def _create_data(self) -> None:
        self._run(
            *(
                _program("pg_basebackup"),
                "--pgdata",
                f"{self.folder}/data",
                "--write-recovery-conf",
            ),
            *("--host", "127.0.0.1", "--port", str(self.primary.port), "--username", "outbox"),
            *("--checkpoint", "fast", "--wal-method", "stream", "--no-sync"),
        )

    def _prepare(self) -> None:
        """The database comes from the primary."""


def dump(server: PostgreSQL, database: str = "outbox", *options: str) -> str:
    """Write a dump of a database with pg_dump. Returns the file, in the server's folder."""
    file = f"{server.folder}/{os.urandom(4).hex()}.dump"
    server._run(
        *(_program("pg_dump"), *_where(server), "--format", "custom", *options),
        *("--file", file, database),
    )
    return file


def restore(server: PostgreSQL, file: str, database: str) -> None:
    """Restore a dump into a new database of a server."""
    server._run(_program("createdb"), *_where(server), database)
    server._run(
        *(_program("pg_restore"), *_where(server), "--dbname", database, "--exit-on-error", file)
    )


def _where(server: PostgreSQL) -> list[str]:
    return ["--host", str(server.folder), "--port", str(server.port), "--username", "outbox"]
