"""A private etcd server."""

from __future__ import annotations

from .base import Server
from .install import MissingPackages, find_program
from .ports import free_port


class Etcd(Server):
    name = "etcd"
    ready_text = "ready to serve client requests"

    @property
    def url(self) -> str:
        return f"etcd3+http://127.0.0.1:{self.port}"

    def _choose_ports(self) -> None:
        self.port, self._peers_port = free_port(), free_port()

    def _command(self) -> list[str]:
        program = find_program("etcd")
        if program is None:
            raise MissingPackages(["etcd-server"])
        clients, peers = (f"http://127.0.0.1:{port}" for port in (self.port, self._peers_port))
        return [
            *(program, "--data-dir", str(self.folder / "data")),
            *("--listen-client-urls", clients, "--advertise-client-urls", clients),
            *("--listen-peer-urls", peers, "--initial-advertise-peer-urls", peers),
            *("--initial-cluster", f"default={peers}"),
            # The shortest lease that etcd grants is one and a half times the election timeout.
            *("--heartbeat-interval", "20", "--election-timeout", "200"),
        ]
