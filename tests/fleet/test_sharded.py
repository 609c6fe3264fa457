"""Commands are routed to the server that leads their entity, and servers may be wrong about it.

Each command is answered once in any case; wrong servers only cause more conflicts.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from wsgiref.simple_server import make_server

import pytest
from django.core.handlers.wsgi import WSGIHandler

from outbox_app.door import client
from outbox_app.door.peers import Peer, peer_named
from outbox_app.entities import Command, forwarding, queue, service
from outbox_app.entities.exceptions import OutcomeUnknown
from outbox_app.entities.messages import forwarded_object, outcome_of
from outbox_app.entities.request import Call
from outbox_app.failpoints import set_failpoint
from outbox_app.fleet import registration
from tests.entities.models import Account
from tests.entities.test_history import check
from tests.fixtures.door import Handler, Server
from tests.patience import SECONDS, eventually, patience
from tests.servers import processes
from tests.servers.ports import free_port

from .test_processes import listed, url

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"]),
    pytest.mark.system,
]
POSTGRES, MARIADB = (pytest.param(name, id=name) for name in ("postgres", "mariadb"))
TYPE = "entities.account"


@pytest.fixture
def start(
    both: None,
    fleet: Any,
    settings: Any,
    declare: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[Callable[..., dict[str, int]]]:
    """``start(*topologies)``: the address and pid of each server. A topology may be a function."""
    monkeypatch.setenv("FLEET_KEY", "s" * 32)
    monkeypatch.setattr(Account, "routed", True)
    monkeypatch.setattr(forwarding, "SECONDS", patience(0.3))

    def where(self: Any) -> int:
        return os.getpid()

    declare(where)
    known = settings.OUTBOX["PEERS"]
    fellow = {"direction": "both", "address": "service:shop"}
    fellow["keys"] = [{"id": "fleet", "secret": "env:FLEET_KEY"}]  # type: ignore[assignment]
    billing = known["billing"] | {"commands": [f"{TYPE}.*"]}
    shop = known["shop"] | {"address": "service:shop"}
    settings.OUTBOX = {**settings.OUTBOX, "PEERS": {"billing": billing, "shop": shop}}
    fleet(DEADLINE=patience(1.0), BALANCE="round_robin")
    started: list[int] = []

    def work(server: Any, topology: Any) -> None:
        settings.OUTBOX = {**settings.OUTBOX, "PEERS": {"billing": billing, "shop": fellow}}
        fleet(ADDRESS=url(server.server_port), TOPOLOGY=topology)
        registration.join()
        server.serve_forever(0.05)

    def run(*topologies: Any) -> dict[str, int]:
        servers = [
            make_server("127.0.0.1", free_port(), WSGIHandler(), Server, Handler)
            for _ in topologies
        ]
        addresses = [url(each.server_port) for each in servers]
        found = {}
        for server, topology in zip(servers, topologies, strict=True):
            given = topology(addresses) if callable(topology) else topology
            pid = os.fork()
            if not pid:
                try:
                    work(server, given)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(0)
            processes.guard_process(pid)
            started.append(pid)
            found[url(server.server_port)] = pid
        for server in servers:
            server.server_close()
        return found

    yield run
    registration.leave()
    for pid in started:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        processes.forget_process(pid)


@pytest.fixture
def account(alias: str) -> None:
    Account.execute("a", "open", {"owner": "ann"}, command_id="open", using=alias)


@pytest.fixture
def where() -> Callable[[str], int]:
    """``where(address)``: the pid of the process that executes a command sent to this server."""
    numbers = iter(range(10**6))

    def ask(address: str) -> int:
        headers = {"Idempotency-Key": f"where-{next(numbers)}"}
        path, peer = f"entities/{TYPE}/a/where", peer_named("shop", "keeper")
        status, said = client.call(
            peer, "POST", path, {}, address=address, headers=headers, seconds=patience(2.0)
        )
        assert status == 200, said
        return int(said["response"])

    return ask


#: What each of two servers believes, and how many of them execute what both are sent.
LIES: dict[str, tuple[tuple[Any, Any], int]] = {
    "each the other": ((lambda all: [all[1]], lambda all: [all[0]]), 2),
    "each itself": ((lambda all: [all[0]], lambda all: [all[1]]), 2),
    "both the same": ((lambda all: [all[0]], lambda all: [all[0]]), 1),
    "that of tomorrow": ((["http://127.0.0.1:1/outbox/"], lambda all: [all[0]]), 1),
    "nothing": ((None, None), 2),
}


@pytest.mark.parametrize("alias", [POSTGRES], indirect=True)
@pytest.mark.parametrize(("topologies", "count"), LIES.values(), ids=LIES)
def test_what_servers_believe(
    start: Any, account: None, where: Any, alias: str, topologies: Any, count: int, request: Any
) -> None:
    there = start(*topologies)
    one, two = there
    found = {address: where(address) for address in there}
    assert len(set(found.values())) == count
    if "other" in request.node.name:  # passed on, and not back
        assert found == {one: there[two], two: there[one]}
    versions = Account.history("a", using=alias).values_list("version", flat=True)
    assert list(versions) == [1, 2, 3]


@pytest.mark.parametrize("alias", [POSTGRES, MARIADB], indirect=True)
def test_a_leader_that_is_stopped_and_killed(
    start: Any, account: None, where: Any, alias: str
) -> None:
    """Every command of eight callers is answered, and the history has no fault."""
    there = start("registered", "registered", "registered")
    eventually(lambda: listed().keys() == there.keys())
    eventually(lambda: len({where(address) for address in there}) == 1, "commands meet")
    leader = where(next(iter(there)))
    assert leader in there.values()
    id, told, unknown, ends = "list", [], [], threading.Event()
    Account.execute(id, "open", {"owner": "x"}, command_id="open", using=alias)
    shop = service("shop")

    def call(caller: int) -> None:
        number = 0
        while not ends.is_set():
            number += 1
            name = f"k-{caller}-{number}"
            said = None
            while said is None and not ends.is_set():
                try:
                    said = shop.execute(TYPE, id, "enlist", {"item": number}, command_id=name)
                except OutcomeUnknown:  # the stopped leader may hold the lock: asked again
                    unknown.append(name)
            if said is None:
                return
            no = said.rejected.code if said.rejected else None
            told.append((id, f"billing:{name}", said.version, said.response, no))

    def more() -> None:
        before = len(told) + len(unknown)
        eventually(
            lambda: len(told) + len(unknown) >= before + 20 or any(each.done() for each in callers)
        )

    with ThreadPoolExecutor(8) as pool:
        callers = [pool.submit(call, n) for n in range(8)]
        try:
            more()
            processes.stop_tree(leader)
            more()
            processes.continue_tree(leader)
            more()
            os.kill(leader, signal.SIGKILL)
            more()
        finally:
            ends.set()
        for each in callers:
            each.result()
    assert len(check(alias, told)) == len(told)


@pytest.mark.parametrize("alias", [POSTGRES, MARIADB], indirect=True)
def test_a_leader_that_is_stopped_with_a_full_queue_and_goes_on(
    start: Any, alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its 500 commands are executed elsewhere meanwhile; when it goes on it finds the answers."""

    def stop() -> None:
        set_failpoint("entity_loaded", None)
        eventually(lambda: queue.queues.waiting >= 450)
        # This thread, as it would take the lock if another one were stopped first.
        signal.pthread_kill(threading.get_ident(), signal.SIGSTOP)

    monkeypatch.setattr(Account, "batch_size", 50)
    monkeypatch.setattr(Account, "timeout", 600.0)
    Account.execute("list", "open", {"owner": "x"}, command_id="open", using=alias)
    set_failpoint("entity_loaded", stop)
    there = start(lambda all: all)
    set_failpoint("entity_loaded", None)
    [(address, pid)] = there.items()
    fellow = Peer(name="shop", keys=[{"id": "fleet", "secret": "env:FLEET_KEY"}])
    asked = [Command("list", "enlist", {"item": n}, command_id=f"k-{n}") for n in range(500)]

    def forward() -> Any:
        commands = [forwarded_object(Call(each)) for each in asked]
        options = {"address": address, "seconds": SECONDS, "most": 10**6}
        return client.call(fellow, "POST", f"routed/{TYPE}", commands, **options)

    with ThreadPoolExecutor(1) as pool:
        forwarded = pool.submit(forward)
        try:
            eventually(lambda: os.waitpid(pid, os.WNOHANG | os.WUNTRACED)[0] == pid)
            here = Account.execute_many(asked, using=alias)
        finally:
            os.kill(pid, signal.SIGCONT)
        status, answers = forwarded.result()
    assert status == 200
    told = []
    for number, (one, other) in enumerate(zip(here, answers, strict=True)):
        no = one.rejected
        assert outcome_of(other) == replace(one, replayed=True)
        told.append(("list", f"k-{number}", one.version, one.response, no and no.code))
    assert len(check(alias, told)) == 500
