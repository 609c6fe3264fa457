"""Two projects that know each other: "shop" keeps the events that "billing" prepares."""

from __future__ import annotations

import json
import socket
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)

from outbox_app.door import clocks
from tests import forking
from tests.patience import eventually
from tests.prepared.conftest import (  # noqa: F401
    ask,
    fences,
    one_way_calls_end,
    published,
    pytest_collection_modifyitems,
    sender,
    states,
    told,
)
from tests.servers import processes
from tests.servers.ports import free_port

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def no_clock_is_noted() -> None:
    """As in a process that has met no peer."""
    clocks._noted.clear()


@pytest.fixture
def new_key(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """``new_key(id)``: ours with "private", theirs with "public", each a file."""

    def make(id: str) -> dict[str, Any]:
        key = Ed25519PrivateKey.generate()
        private, public = tmp_path / f"{id}.key", tmp_path / f"{id}.pub"
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        private.write_bytes(pem)
        public.write_bytes(
            key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)
        )
        return {
            "ours": {"id": id, "private": f"file:{private}"},
            "theirs": {"id": id, "public": f"file:{public}"},
        }

    return make


@pytest.fixture
def ports() -> dict[str, int]:
    return {"shop": free_port(), "billing": free_port()}


@pytest.fixture
def peers(new_key: Any, ports: dict[str, int], sender: str) -> dict[str, Any]:  # noqa: F811
    """``peers[project]``: OUTBOX["PEERS"] of each."""
    shop, billing = new_key("shop-1"), new_key("billing-1")
    return {
        "shop": {
            "billing": {
                "direction": "sender",
                "address": f"http://127.0.0.1:{ports['billing']}/outbox/",
                "types": ["order.*"],
                "topics": ["paid"],
                "jobs": ["tests.door.*"],
                "keys": [shop["ours"], billing["theirs"]],
            }
        },
        "billing": {
            "shop": {
                "direction": "keeper",
                "address": f"http://127.0.0.1:{ports['shop']}/outbox/",
                "database": sender,
                "keys": [billing["ours"], shop["theirs"]],
            }
        },
    }


@pytest.fixture
def both(settings: Any, peers: dict[str, Any]) -> None:
    """This process is both projects, by the names of its peers."""
    settings.ROOT_URLCONF = "tests.door.urls"
    settings.ALLOWED_HOSTS = ["127.0.0.1", "localhost"]
    settings.OUTBOX = {**settings.OUTBOX, "PEERS": peers["shop"] | peers["billing"]}


@pytest.fixture
def variables(environment: Any, peers: dict[str, Any]) -> Callable[[str, str], dict[str, str]]:
    """``variables(project, alias)``: of a process of a project whose outbox is on an alias."""

    def make(project: str, alias: str) -> dict[str, str]:
        return {
            **environment(alias),
            "DJANGO_SETTINGS_MODULE": "tests.door.project",
            "DOOR_PEERS": json.dumps(peers[project]),
        }

    return make


@pytest.fixture
def serve(variables: Any, ports: dict[str, int], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """``serve(project, alias)``: its door, in a process of its own; ``.kill()`` is kill -9."""
    started: list[Any] = []

    def start(project: str, alias: str, **more: str) -> Any:
        port = ports[project]
        log = tmp_path / f"{project}.log"
        command = ["gunicorn", "--preload", "--worker-class", "gthread", "--threads", "4"]
        command += ["--bind", f"127.0.0.1:{port}", "tests.door.project:application"]
        with log.open("a") as out:
            process = forking.Popen(
                [sys.executable, "-m", *command],
                cwd=ROOT,
                env={**variables(project, alias), **more},
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        processes.guard_process(process.pid)
        started.append(process)

        def listens() -> bool:
            assert process.poll() is None, log.read_text()
            with socket.socket() as probe:
                return probe.connect_ex(("127.0.0.1", port)) == 0

        eventually(listens)

        def kill() -> None:
            if process.poll() is None:
                # Its workers have ended, too: the next one to listen is the next server.
                processes.kill_trees([process.pid])
                process.wait()

        process.kill = kill
        return process

    yield start
    for process in started:
        process.kill()
        processes.forget_process(process.pid)
