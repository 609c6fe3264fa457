"""A private PostgreSQL server.

Clients connect as the superuser ``outbox`` without a password to the database ``outbox``, over TCP
or over a socket in the server's folder. The server never flushes to the disk, which is fast and
safe, except in a crash of the machine: committed transactions survive ``kill``.
"""

from __future__ import annotations

import os
import pwd
import signal
from collections.abc import Sequence

from .base import Server, ServerFailed
from .install import MissingPackages, find_postgres_program

_SETTINGS = {
    "fsync": "off",
    # With "off" the server would keep commits in its memory for a while, and kill() would lose
    # them. Without fsync, "on" is no slower.
    "synchronous_commit": "on",
    "full_page_writes": "off",
    "max_connections": "200",
    "max_prepared_transactions": "20",
    "listen_addresses": "127.0.0.1",
    # Shared memory in files of the data folder: files in /dev/shm would outlive a killed server.
    "dynamic_shared_memory_type": "mmap",
}


class PostgreSQL(Server):
    name = "postgres"
    ready_text = "database system is ready to accept connections"
    stop_signal = signal.SIGINT  # It ends open connections; SIGTERM would wait for them.

    def __init__(self, *, extra_arguments: Sequence[str] = ()) -> None:
        super().__init__(extra_arguments=extra_arguments)
        if os.geteuid() == 0:  # PostgreSQL refuses to run as root.
            self.user = _existing_user("postgres", "nobody")

    @property
    def url(self) -> str:
        return f"postgres://outbox@127.0.0.1:{self.port}/outbox"

    def _create_data(self) -> None:
        self._run(
            *(_program("initdb"), "--pgdata", f"{self.folder}/data", "--username", "outbox"),
            *("--auth", "trust", "--encoding", "UTF8", "--locale", "C.UTF-8", "--no-sync"),
        )

    def _command(self) -> list[str]:
        settings = _SETTINGS | {
            "port": str(self.port),
            "unix_socket_directories": str(self.folder),
        }
        arguments = [part for key, value in settings.items() for part in ("-c", f"{key}={value}")]
        return [
            *(_program("postgres"), "-D", f"{self.folder}/data", *arguments),
            *self.extra_arguments,
        ]

    def _prepare(self) -> None:
        self._run(
            *(_program("createdb"), "--host", str(self.folder), "--port", str(self.port)),
            *("--username", "outbox", "outbox"),
        )


def _program(name: str) -> str:
    program = find_postgres_program(name)
    if program is None:
        raise MissingPackages(["postgresql"])
    return program


def _existing_user(*names: str) -> str:
    for name in names:
        try:
            return pwd.getpwnam(name).pw_name
        except KeyError:
            continue
    raise ServerFailed(f"PostgreSQL cannot run as root, and there is no user {' or '.join(names)}")
