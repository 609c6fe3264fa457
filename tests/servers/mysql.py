"""A private MySQL server, of Debian's unstable packages (see ``unpacked``), and its copies.

Clients connect as to MariaDB: over TCP as the user ``outbox`` with the password ``outbox`` to the
database ``outbox``. The server never flushes to the disk, but committed transactions survive
``kill``. It has what many installations have: a binary log by rows, with GTIDs, and no table
without a primary key; and it has no performance_schema, which nothing here needs.
"""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from typing import Any

from .mariadb import FIRST_STATEMENTS, MariaDB
from .unpacked import command, unpacked

PACKAGES = ("mysql-server-core", "mysql-client-core")
#: Whether MySQL takes the place of MariaDB in the tests (see ``tests.on_mysql``).
ON_MYSQL = bool(os.environ.get("MYSQL_URL"))


class MySQL(MariaDB):
    name = "mysql"
    ready_text = "ready for connections. Version"

    def _create_data(self) -> None:
        (self.folder / "first.sql").write_text("SET sql_log_bin = 0;\n" + FIRST_STATEMENTS)
        # How names of tables are stored is decided here.
        case = [each for each in self.extra_arguments if "lower-case-table-names" in each]
        self._run(*self._program(), *case, "--initialize-insecure")

    def _command(self) -> list[str]:
        return [
            *(*self._program(), *self._server_arguments()),
            *("--mysqlx=OFF", "--secure-file-priv=NULL", "--performance-schema=OFF"),
            *("--log-bin=binlog", f"--server-id={self.port}", "--sync-binlog=0"),
            *("--gtid-mode=ON", "--enforce-gtid-consistency=ON", "--sql-require-primary-key=ON"),
            "--max-allowed-packet=16M",  # as MariaDB's default
            *self.extra_arguments,
        ]

    def _server_arguments(self) -> list[str]:
        return [each for each in super()._server_arguments() if each != "--skip-log-bin"]

    def _program(self) -> list[str]:
        root = unpacked(*PACKAGES)
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

    def client(self, program: str, *arguments: str, input: Path = Path(os.devnull)) -> None:
        """Run a client program of MySQL, as root, to its end."""
        place = ("--no-defaults", f"--socket={self.folder}/socket", "--user=root")
        begin = command(unpacked(*PACKAGES), f"usr/bin/{program}")
        self._run("sh", "-c", 'exec "$@" < "$0"', str(input), *begin, *place, *arguments)

    def dump(self, database: str) -> Path:
        """Write a dump of a database, as of one moment. Returns the file."""
        file = self.folder / f"{os.urandom(4).hex()}.sql"
        options = ("--single-transaction", "--set-gtid-purged=OFF", f"--result-file={file}")
        self.client("mysqldump", *options, database)
        return file

    def restore(self, file: Path, database: str) -> None:
        """Restore a dump into a new database of this server."""
        self.client("mysql", f"--execute=CREATE DATABASE {database}")
        self.client("mysql", database, input=file)


class Replica(MySQL):
    """A read-only replica of a private server, which is new: by GTIDs, from its beginning.

    Args:
        source: A running server.
    """

    def __init__(self, source: MySQL, **options: Any) -> None:
        super().__init__(**options)
        self.source = source

    def _prepare(self) -> None:
        source = (
            f"SOURCE_HOST = '127.0.0.1', SOURCE_PORT = {self.source.port}, SOURCE_USER = 'outbox', "
            "SOURCE_PASSWORD = 'outbox', SOURCE_AUTO_POSITION = 1, GET_SOURCE_PUBLIC_KEY = 1"
        )
        statements = f"CHANGE REPLICATION SOURCE TO {source}; START REPLICA"
        self.client("mysql", f"--execute=SET GLOBAL super_read_only = ON; {statements}")

    def promote(self) -> None:
        """Apply what has been received, and take writes."""
        import MySQLdb
        from MySQLdb.cursors import DictCursor

        place = {"unix_socket": f"{self.folder}/socket", "user": "root"}
        with closing(MySQLdb.connect(**place, cursorclass=DictCursor)) as connection:
            cursor = connection.cursor()
            cursor.execute("STOP REPLICA IO_THREAD")
            cursor.execute("SHOW REPLICA STATUS")
            received = cursor.fetchone()["Retrieved_Gtid_Set"]
            cursor.execute("DO WAIT_FOR_EXECUTED_GTID_SET(%s)", [received])
            cursor.execute("STOP REPLICA")
            cursor.execute("RESET REPLICA ALL")
            cursor.execute("SET GLOBAL read_only = OFF")


#: The alias of MariaDB, or of MySQL in its place; and the kind of its server.
MARIADB = "mysql" if ON_MYSQL else "mariadb"
MARIADB_SERVER: type[MariaDB] = MySQL if ON_MYSQL else MariaDB
