"""A private MySQL server, of Debian's unstable packages (see ``unpacked``).

Clients connect as to MariaDB: over TCP as the user ``outbox`` with the password ``outbox`` to the
database ``outbox``. The server never flushes to the disk, but committed transactions survive
``kill``.
"""

from __future__ import annotations

import os

from .mariadb import FIRST_STATEMENTS, MariaDB
from .unpacked import command, unpacked

#: Whether MySQL takes the place of MariaDB in the tests (see ``tests.on_mysql``).
ON_MYSQL = bool(os.environ.get("MYSQL_URL"))


class MySQL(MariaDB):
    name = "mysql"
    ready_text = "ready for connections. Version"

    def _create_data(self) -> None:
        (self.folder / "first.sql").write_text(FIRST_STATEMENTS)
        self._run(*self._program(), "--initialize-insecure")

    def _command(self) -> list[str]:
        return [
            *(*self._program(), *self._server_arguments()),
            *("--mysqlx=OFF", "--secure-file-priv=NULL"),
            *self.extra_arguments,
        ]

    def _program(self) -> list[str]:
        root = unpacked("mysql-server-core")
        return [
            *(*command(root, "usr/sbin/mysqld"), "--no-defaults"),
            *(f"--basedir={root}/usr", f"--plugin-dir={root}/usr/lib/mysql/plugin"),
            f"--lc-messages-dir={root}/usr/share/mysql",
            f"--character-sets-dir={root}/usr/share/mysql/charsets",
            *(f"--datadir={self.folder}/data", *(("--user=root",) if os.geteuid() == 0 else ())),
            *("--innodb-buffer-pool-size=32M", "--innodb-redo-log-capacity=32M"),
            # As MariaDB's: 2 hands each commit to the operating system.
            *("--innodb-flush-log-at-trx-commit=2", "--innodb-flush-method=nosync"),
        ]


#: The alias of MariaDB, or of MySQL in its place; and the kind of its server.
MARIADB = "mysql" if ON_MYSQL else "mariadb"
MARIADB_SERVER: type[MariaDB] = MySQL if ON_MYSQL else MariaDB
