"""A private RabbitMQ broker without RabbitMQ's plugins, with its own epmd.

Node name, cookie, data, logs and all ports are private, so that the broker can neither disturb nor
find another one. ``kill`` and ``pause`` affect the broker; epmd runs until ``close``. Durable
queues and persistent messages survive ``stop`` and ``kill``. One broker can serve several workers,
each in a virtual host: starting a broker takes more time than all their messages.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from . import processes
from .base import PortTaken, Server
from .install import MissingPackages, find_program, find_rabbitmq_program
from .ports import free_port

_CONFIG = """\
disk_free_limit.absolute = 1MB
load_definitions = {folder}/definitions.json
"""


class RabbitMQ(Server):
    name = "rabbitmq"
    ready_text = "Server startup complete"

    def __init__(
        self,
        *,
        extra_arguments: Sequence[str] = (),
        extra_config: str = "",
        virtual_hosts: Sequence[str] = ("/",),
        plugins: Sequence[str] = (),
    ) -> None:
        """``plugins``: names of RabbitMQ's plugins, or of Erlang modules beside this file."""
        super().__init__(extra_arguments=extra_arguments)
        self.plugins = tuple(plugins)
        self.extra_config = extra_config
        self.virtual_hosts = tuple(virtual_hosts)
        self._distribution_port = 0
        self._epmd_port = 0
        self._epmd: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return self.urls[0]

    @property
    def urls(self) -> list[str]:
        """The address of each virtual host."""
        return [f"amqp://guest:guest@127.0.0.1:{self.port}/{name}" for name in self.virtual_hosts]

    def control(self, *arguments: str) -> str:
        """Run rabbitmqctl for this broker. Returns its output."""
        command = [_rabbitmq_program("rabbitmqctl"), "--quiet", *arguments]
        return subprocess.run(
            command, env=self._environment(), check=True, capture_output=True, text=True
        ).stdout

    def _choose_ports(self) -> None:
        self.port, self._distribution_port, self._epmd_port = (free_port() for _ in range(3))

    def _create_data(self) -> None:
        config = _CONFIG.format(folder=self.folder)
        (self.folder / "rabbitmq.conf").write_text(config + self.extra_config)
        (self.folder / "definitions.json").write_text(json.dumps(self._definitions()))
        (self.folder / "enabled_plugins").write_text(f"[{','.join(self.plugins)}].\n")
        for name in self.plugins:
            if (source := Path(__file__).with_name(f"{name}.erl")).exists():
                self._compile(source)

    def _compile(self, source: Path) -> None:
        """Make a plugin of an Erlang module, in a folder of this broker."""
        folder = self.folder / f"plugins/{source.stem}-1/ebin"
        folder.mkdir(parents=True)
        command = [_erlang_program("erlc"), "-o", str(folder), str(source)]
        libraries = os.environ | {"ERL_LIBS": str(_plugins_folder())}
        subprocess.run(command, env=libraries, check=True, capture_output=True)
        about = (
            f'{{description, ""}}, {{vsn, "1"}}, {{modules, [{source.stem}]}}, {{registered, []}}'
        )
        uses = "{applications, [kernel, stdlib, rabbit_common, rabbit]}"
        text = f"{{application, {source.stem}, [{about}, {uses}]}}.\n"
        (folder / f"{source.stem}.app").write_text(text)

    def _definitions(self) -> dict[str, list[dict[str, str]]]:
        """Return the initial definitions: virtual hosts, and "guest" with all permissions."""
        salt = bytes(4)
        password = base64.b64encode(salt + hashlib.sha256(salt + b"guest").digest()).decode()
        everything = {"configure": ".*", "write": ".*", "read": ".*"}
        return {
            "users": [{"name": "guest", "password_hash": password, "tags": "administrator"}],
            "vhosts": [{"name": name} for name in self.virtual_hosts],
            "permissions": [
                {"user": "guest", "vhost": name, **everything} for name in self.virtual_hosts
            ],
        }

    def _command(self) -> list[str]:
        return [_rabbitmq_program("rabbitmq-server"), *self.extra_arguments]

    def _launch(self) -> None:
        if self._epmd is None or self._epmd.poll() is not None:
            # Start epmd ourselves, in the foreground: an epmd started by the broker would detach.
            arguments = ("-address", "127.0.0.1", "-port", str(self._epmd_port))
            self._epmd = self._spawn([_erlang_program("epmd"), *arguments])
        super()._launch()

    def _pause_between_looks(self) -> None:
        super()._pause_between_looks()
        if self._epmd is not None and self._epmd.poll() is not None:
            raise PortTaken(f"epmd could not use its port {self._epmd_port}")

    def _discard(self) -> None:
        super()._discard()
        epmd, self._epmd = self._epmd, None
        if epmd is not None:
            epmd.kill()
            epmd.wait()
            processes.forget_process(epmd.pid)

    def _environment(self) -> dict[str, str]:
        folder = str(self.folder)
        return super()._environment() | {
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_CRASH_DUMP_SECONDS": "0",
            # For all Erlang programs: a helper of the broker would start a detached epmd.
            "ERL_FLAGS": "-start_epmd false",
            "RABBITMQ_NODENAME": f"outbox-{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._distribution_port),
            "RABBITMQ_MNESIA_BASE": f"{folder}/mnesia",
            "RABBITMQ_LOG_BASE": f"{folder}/logs",
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_CONFIG_FILE": f"{folder}/rabbitmq.conf",
            "RABBITMQ_ADVANCED_CONFIG_FILE": f"{folder}/advanced.config",
            "RABBITMQ_CONF_ENV_FILE": f"{folder}/rabbitmq-env.conf",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/enabled_plugins",
            "RABBITMQ_PLUGINS_DIR": f"{_plugins_folder()}:{folder}/plugins",
            # With this variable the script execs the broker, so that our pid is the broker's.
            "RABBITMQ_ALLOW_INPUT": "1",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": (
                "-noinput -kernel inet_dist_use_interface {127,0,0,1} "
                "+sbwt none +sbwtdcpu none +sbwtdio none"  # no busy waiting while idle
            ),
        }


def _rabbitmq_program(name: str) -> str:
    program = find_rabbitmq_program(name)
    if program is None:
        raise MissingPackages(["rabbitmq-server"])
    return program


def _plugins_folder() -> Path:
    """Return the folder of RabbitMQ's own plugins, which has the headers for others."""
    [*_, folder] = sorted(Path(_rabbitmq_program("rabbitmqctl")).parents[1].glob("lib/*/plugins"))
    return folder


def _erlang_program(name: str) -> str:
    program = find_program(name)
    if program is None:
        raise MissingPackages(["erlang-base"])
    return program
