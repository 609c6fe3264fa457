"""A private MariaDB server.

Clients connect over TCP as the user ``outbox`` with the password ``outbox`` to the database
``outbox``. The user has all privileges, and may create databases. The server never flushes to the
disk, but committed transactions survive ``kill``.
"""

from __future__ import annotations

import os

from .base import Server
from .install import MissingPackages, find_program

FIRST_STATEMENTS = """\
CREATE DATABASE IF NOT EXISTS outbox;
CREATE USER IF NOT EXISTS 'outbox'@'%' IDENTIFIED BY 'outbox';
GRANT ALL PRIVILEGES ON *.* TO 'outbox'@'%' WITH GRANT OPTION;
"""


class MariaDB(Server):
    name = "mariadb"
    ready_text = "ready for connections."

    @property
    def url(self) -> str:
        return f"mysql://outbox:outbox@127.0.0.1:{self.port}/outbox"

    def _create_data(self) -> None:
        (self.folder / "first.sql").write_text(FIRST_STATEMENTS)
        self._run(
            *(_program("mariadb-install-db"), *self._storage_arguments()),
            *("--skip-test-db", "--skip-name-resolve", "--auth-root-authentication-method=normal"),
        )

    def _command(self) -> list[str]:
        return [
            *(_program("mariadbd"), *self._storage_arguments(), *self._server_arguments()),
            *self.extra_arguments,
        ]

    def _server_arguments(self) -> list[str]:
        return [
            f"--init-file={self.folder}/first.sql",
            *("--bind-address=127.0.0.1", f"--port={self.port}"),
            *(f"--socket={self.folder}/socket", f"--pid-file={self.folder}/pid"),
            *("--character-set-server=utf8mb4", "--collation-server=utf8mb4_unicode_ci"),
            *("--skip-name-resolve", "--max-connections=200", "--skip-log-bin"),
        ]

    def _storage_arguments(self) -> list[str]:
        return [
            *("--no-defaults", f"--datadir={self.folder}/data"),
            *(("--user=root",) if os.geteuid() == 0 else ()),
            *("--innodb-buffer-pool-size=32M", "--innodb-log-file-size=16M"),
            # With 0 the server would keep commits in its memory for up to a second, and kill()
            # would lose them. With 2 it hands them to the operating system.
            *("--innodb-flush-log-at-trx-commit=2", "--loose-innodb-flush-method=nosync"),
        ]


def _program(name: str) -> str:
    program = find_program(name)
    if program is None:
        raise MissingPackages(["mariadb-server"])
    return program
