"""Servers that are killed, stopped, broken and replaced, and a registry that is cut off.

Each server is a fork of this process with its own socket. Every call must be answered.
"""

from __future__ import annotations

import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from typing import Any
from uuid import UUID
from wsgiref.simple_server import WSGIServer, make_server

import pytest
from django.contrib.auth.models import Group
from django.core.handlers.wsgi import WSGIHandler

from outbox_app.door.exceptions import PeerUnavailable
from outbox_app.door.peers import peer_named
from outbox_app.entities import service
from outbox_app.failpoints import set_failpoint
from outbox_app.fleet import registration, servers
from outbox_app.prepared import prepared
from outbox_app.prepared.models import PreparedEvent
from tests.entities.models import Account
from tests.fixtures.door import Handler, Server
from tests.patience import eventually, patience
from tests.prepared.test_faults import behind
from tests.servers import Proxy, processes
from tests.servers.ports import free_port

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"]),
    pytest.mark.parametrize("alias", [pytest.param("postgres", id="postgres")], indirect=True),
    pytest.mark.system,
]


def broken(environ: Any, start_response: Any) -> list[bytes]:
    start_response("500 Internal Server Error", [("Content-Type", "text/html")])
    return [b"<h1>Server Error</h1>"]


def url(port: int) -> str:
    return f"http://127.0.0.1:{port}/outbox/"


@pytest.fixture
def serve(both: None, fleet: Any, settings: Any) -> Iterator[Callable[..., tuple[int, str]]]:
    """``serve()``: start a server of the shop. Returns its pid and address."""
    known = settings.OUTBOX["PEERS"]
    shop = known["shop"] | {"address": "service:shop"}
    settings.OUTBOX = {**settings.OUTBOX, "PEERS": known | {"shop": shop}}
    fleet(DEADLINE=patience(1.0))
    started: list[int] = []

    def work(server: WSGIServer) -> None:
        def stop(*args: Any) -> None:
            threading.Thread(target=server.shutdown).start()

        signal.signal(signal.SIGTERM, stop)
        fleet(ADDRESS=url(server.server_port))
        registration.join()
        server.serve_forever(0.05)
        server.server_close()
        registration.leave()  # as at exit

    def start(application: Any = None) -> tuple[int, str]:
        # Made here: between a look for a free port and its use others may take it.
        answers = application or WSGIHandler()
        with make_server("127.0.0.1", free_port(), answers, Server, Handler) as server:
            address = url(server.server_port)
            pid = os.fork()
            if not pid:
                try:
                    work(server)
                except BaseException:
                    traceback.print_exc()
                finally:
                    os._exit(0)
        processes.guard_process(pid)
        started.append(pid)
        return pid, address

    yield start
    registration.leave()
    for pid in started:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        processes.forget_process(pid)


def listed() -> dict[str, UUID]:
    return {each.member.address: each.member.id for each in servers("shop")}


@pytest.fixture
def answered() -> Callable[[int], None]:
    """``answered(n)``: make so many calls, each of which must be answered."""
    shop: list[Any] = []

    def call(count: int = 1) -> bool:
        shop[:] = shop or [peer_named("shop", "keeper")]
        for _ in range(count):
            said = service("shop").call(shop[0], "GET", "prepared/open?skip=0")
            assert said == (200, [])
        return True

    return call


def test_servers_come_and_go(serve: Any, answered: Any, alias: str, sender: str) -> None:
    (killed, one), (stopped, two), (third, three) = serve(), serve(), serve()
    eventually(lambda: listed().keys() == {one, two, three})  # found, and called by nothing yet
    with prepared("order-17", "order.paid", using=sender, to="shop", wait=True):
        Group.objects.using(sender).create(name="paid")
    assert PreparedEvent.objects.using(alias).get().state == "confirmed"
    answered(10)

    os.kill(killed, signal.SIGKILL)
    answered(12)
    eventually(lambda: answered() and listed().keys() == {two, three})

    before = listed()[two]
    processes.stop_tree(stopped)
    try:
        answered(12)
        eventually(lambda: answered() and two not in listed())
    finally:
        processes.continue_tree(stopped)
    eventually(lambda: answered() and listed().get(two, before) != before)

    wrong, five_hundred = serve(broken)
    eventually(lambda: five_hundred in listed())
    eventually(lambda: answered() and any("500" in each.why for each in servers("shop")))

    for old in (stopped, third, wrong):  # a rolling restart
        _, new = serve()
        eventually(lambda new=new: answered() and new in listed())
        os.kill(old, signal.SIGTERM)
        answered(10)
    eventually(lambda: answered() and not {one, two, three, five_hundred} & listed().keys())
    assert len(listed()) == 3


def test_a_registry_that_is_cut_off(serve: Any, answered: Any, settings: Any, alias: str) -> None:
    """Servers go on, and so do those who call them; what changed meanwhile is seen afterwards."""
    there = settings.DATABASES[alias]
    _, one = serve()
    with (
        Proxy(there["HOST"], int(there["PORT"])) as link,
        behind(alias, link.port),
    ):
        eventually(lambda: listed().keys() == {one})
        link.mode = "blackhole"
        eventually(lambda: answered() and any(each.kept for each in servers("shop")))
        answered(10)
        assert listed().keys() == {one}
        link.mode = "pass"
        link.cut()
        eventually(lambda: answered() and not any(each.kept for each in servers("shop")))
        registration.leave()


def test_no_server_answers(serve: Any, answered: Any) -> None:
    """An error, and it comes within the deadline."""
    pid, one = serve()
    eventually(lambda: listed().keys() == {one})
    processes.stop_tree(pid)
    try:
        with pytest.raises(PeerUnavailable, match="gave no answer"):
            answered()
    finally:
        processes.continue_tree(pid)
    eventually(lambda: one in listed())


def test_commands_survive_their_servers(serve: Any, alias: str, settings: Any) -> None:
    """One dies when it has committed, one is stopped: each command is answered, and done once."""
    known = settings.OUTBOX["PEERS"]
    known["billing"]["commands"] = ["entities.account.*"]
    shop = service("shop", balance="round_robin")

    def execute(name: str, command: str = "withdraw", **arguments: Any) -> Any:
        return shop.execute("entities.account", "a", command, arguments, command_id=name)

    def dies() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    set_failpoint("entity_committed", dies)
    _, one = serve()
    set_failpoint("entity_committed", None)
    (stopped, two), (_, three) = serve(), serve()
    eventually(lambda: listed().keys() == {one, two, three})
    outcomes = [execute("open", "open", owner="ann", balance=100)]
    outcomes += [execute(f"k-{n}", amount=1) for n in range(3)]
    assert any(each.replayed for each in outcomes)  # the second server has said what the first did
    processes.stop_tree(stopped)
    try:
        outcomes += [execute(f"k-{n}", amount=1) for n in range(3, 9)]
    finally:
        processes.continue_tree(stopped)
    assert [each.version for each in outcomes] == list(range(1, 11))
    assert Account.objects.using(alias).get().state["balance"] == 91
    again = [execute(f"k-{n}", amount=1) for n in range(9)]
    assert all(each.replayed for each in again)
    assert [each.version for each in again] == list(range(2, 11))
