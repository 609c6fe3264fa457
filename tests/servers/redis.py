"""A private Redis server without persistence.

The server loses its data on ``stop`` and ``kill``. For a server that keeps its data, pass
``extra_arguments=("--appendonly", "yes")``.
"""

from __future__ import annotations

from .base import Server
from .install import MissingPackages, find_program


class Redis(Server):
    name = "redis"
    ready_text = "Ready to accept connections"

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def _command(self) -> list[str]:
        program = find_program("redis-server")
        if program is None:
            raise MissingPackages(["redis-server"])
        return [
            *(program, "--bind", "127.0.0.1", "--port", str(self.port)),
            *("--dir", str(self.folder), "--save", "", "--appendonly", "no"),
            *self.extra_arguments,
        ]
