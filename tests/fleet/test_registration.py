"""A process registers when it starts, again when its row is gone, and unregisters at its end."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import pytest
from django.db import connections

from outbox_app.database.clock import DatabaseNow
from outbox_app.fleet import gunicorn, register, registration, servers
from outbox_app.fleet.models import Server
from outbox_app.fleet.registry import CLIENT, SERVER, new_registry
from tests.patience import eventually

pytestmark = pytest.mark.django_db(transaction=True)
URL = "http://127.0.0.1:1/outbox/"


@pytest.fixture
def rows(alias: str, fleet: Any) -> Callable[[], list[tuple[str, str]]]:
    def read() -> list[tuple[str, str]]:
        return list(Server.objects.using(alias).values_list("kind", "address"))

    return read


def test_the_lifespan_of_asgi(rows: Any, fleet: Any) -> None:
    fleet(ADDRESS=URL, WEIGHT=40)
    sent: list[Any] = []

    async def application(scope: Any, receive: Any, send: Any) -> None:
        sent.append(scope["type"])

    def is_registered() -> bool:
        try:
            return rows() == [("server", URL)]  # type: ignore[no-any-return]
        finally:
            connections.close_all()  # of a thread that ends

    async def live() -> None:
        messages: asyncio.Queue[Any] = asyncio.Queue()

        async def send(message: Any) -> None:
            sent.append(message["type"])

        life = asyncio.create_task(wrapped({"type": "lifespan"}, messages.get, send))
        await messages.put({"type": "lifespan.startup"})
        await asyncio.to_thread(eventually, is_registered)
        await wrapped({"type": "http"}, messages.get, send)
        await messages.put({"type": "lifespan.shutdown"})
        await life

    wrapped = register(application)
    asyncio.run(live())
    assert sent == ["lifespan.startup.complete", "http", "lifespan.shutdown.complete"]
    assert rows() == []


def test_without_a_service_nothing_is_registered(rows: Any, fleet: Any) -> None:
    fleet(SERVICE="")
    registration.join()
    assert registration._registration is None


def test_a_client_that_becomes_a_server(rows: Any, fleet: Any) -> None:
    assert servers("shop") == []
    eventually(lambda: rows() == [("client", "")])
    fleet(ADDRESS=URL)
    registration.join()
    eventually(lambda: rows() == [("server", URL)])
    servers("shop")
    assert registration._registration is not None
    assert registration._registration.member.kind == SERVER


def test_a_server_that_starts_in_a_thread(rows: Any, fleet: Any) -> None:
    """Which may not handle signals."""
    fleet(ADDRESS=URL)
    before = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(registration.join).result()
    eventually(lambda: rows() == [("server", URL)])
    assert signal.getsignal(signal.SIGTERM) is before


def test_a_handler_in_c_stays(monkeypatch: Any) -> None:
    """Ours could not call it, and the process would not end any more."""
    before = signal.getsignal(signal.SIGTERM)
    with monkeypatch.context() as patched:
        patched.setattr(signal, "getsignal", lambda number: None)
        registration._leave_on(signal.SIGTERM)
    after = signal.signal(signal.SIGTERM, before)
    assert after is before


def test_a_process_that_calls_is_a_client(rows: Any) -> None:
    assert servers("shop") == []
    eventually(lambda: rows() == [("client", "")])
    registration.leave()
    assert rows() == []


def test_a_row_that_is_gone_comes_back_with_another_id(alias: str, rows: Any, fleet: Any) -> None:
    fleet(ADDRESS=URL)
    registration.join()
    eventually(rows)
    [before] = Server.objects.using(alias)
    before.delete()
    eventually(rows)
    [after] = Server.objects.using(alias)
    assert after.id != before.id
    assert after.node == f"{os.uname().nodename}:{os.getpid()}"


def test_a_registry_that_is_away_is_waited_for(rows: Any, fleet: Any, monkeypatch: Any) -> None:
    from outbox_app.fleet.registries import DatabaseRegistry

    fleet(ADDRESS=URL)
    failed: list[int] = []

    def fail(*args: Any) -> None:
        failed.append(1)
        raise OSError("cut off")

    with monkeypatch.context() as patched:
        patched.setattr(DatabaseRegistry, "register", fail)
        registration.join()
        eventually(lambda: len(failed) > 1)
        assert rows() == []
    eventually(lambda: rows() == [("server", URL)])


def test_what_was_drained_comes_back_so(alias: str, rows: Any, fleet: Any) -> None:
    fleet(ADDRESS=URL)
    kept, registry = registration.Registration(SERVER), new_registry()
    kept.step(registry)
    registry.change(URL, weight=7, draining=True)
    kept.step(registry)
    Server.objects.using(alias).all().delete()  # its lease has run out
    kept.step(registry)
    [row] = Server.objects.using(alias)
    assert (row.weight, row.draining) == (7, True)


def test_who_registers_removes_those_that_are_silent(alias: str, rows: Any, fleet: Any) -> None:
    """Also where none looks at the list."""
    row = {"service": "shop", "address": URL, "node": "x", "version": "1", "lease_seconds": 1}
    table = Server.objects.using(alias)
    table.create(**row)
    table.update(heartbeat_at=DatabaseNow() - timedelta(hours=1))
    registration.Registration(CLIENT).step(new_registry())
    assert rows() == [("client", "")]


@pytest.mark.parametrize("name", ["outbox-fleet", "outbox-watchdog"])
def test_a_thread_that_could_not_be_started(
    rows: Any, fleet: Any, cannot_start: list[str], name: str
) -> None:
    fleet(ADDRESS=URL)
    cannot_start.append(name)
    for _ in range(2):
        with suppress(RuntimeError):
            registration.join()
    eventually(lambda: rows() == [("server", URL)])
    assert cannot_start == []


def test_a_list_whose_thread_could_not_be_started(
    alias: str, fleet: Any, cannot_start: list[str]
) -> None:
    fleet(SERVICE="")
    row = {"service": "bank", "address": URL, "node": "x", "version": "1", "lease_seconds": 600}
    Server.objects.using(alias).create(**row)
    cannot_start.append("outbox-watchdog")
    assert servers("bank") == []
    eventually(lambda: [each.member.address for each in servers("bank")] == [URL])


def test_imported_before_django_is_set_up() -> None:
    """As asgi.py does, and gunicorn's configuration file, which is read before gevent patches."""
    code = "import sys, outbox_app.fleet.gunicorn; assert 'django' not in sys.modules; "
    code += "from outbox_app.fleet import register"
    environment = {k: v for k, v in os.environ.items() if k != "DJANGO_SETTINGS_MODULE"}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)


def in_a_child(run: Callable[[], None]) -> int:
    """Run it in a fork of this process; return the pid."""
    if child := os.fork():
        return child
    try:
        run()
    finally:
        os._exit(1)


def test_a_worker_of_gunicorn_leaves_on_sigterm_and_ends(rows: Any, fleet: Any) -> None:
    """What its SIGTERM did before, it does."""
    fleet(ADDRESS=URL)

    def work() -> None:
        signal.signal(signal.SIGTERM, lambda *args: sys.exit(3))
        try:
            gunicorn.register(None)  # a thread registers: the signal may come at once
            signal.pause()
        except SystemExit as end:
            registration.leave()  # as at exit
            os._exit(int(str(end.code)))

    child = in_a_child(work)
    eventually(lambda: rows() == [("server", URL)])
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert rows() == []


def test_sigterm_takes_off_a_server_that_ends_later(rows: Any, fleet: Any) -> None:
    """Which has requests to answer, and gets no others meanwhile."""
    fleet(ADDRESS=URL)

    def work() -> None:
        signal.signal(signal.SIGTERM, lambda *args: None)
        registration.join()
        while True:
            signal.pause()

    child = in_a_child(work)
    try:
        eventually(lambda: rows() == [("server", URL)])
        os.kill(child, signal.SIGTERM)
        eventually(lambda: rows() == [])
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_sigterm_without_a_handler_leaves_and_ends(rows: Any, fleet: Any) -> None:
    fleet(ADDRESS=URL)

    def work() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        registration.join()
        while True:
            signal.pause()

    child = in_a_child(work)
    eventually(lambda: rows() == [("server", URL)])
    os.kill(child, signal.SIGTERM)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert rows() == []


def test_a_fork_registers_nothing_and_takes_nothing_off(rows: Any, fleet: Any) -> None:
    fleet(ADDRESS=URL)
    registration.join()
    eventually(rows)

    def work() -> None:
        assert registration._registration is None
        registration.leave()
        os._exit(0)

    assert os.waitstatus_to_exitcode(os.waitpid(in_a_child(work), 0)[1]) == 0
    assert rows() == [("server", URL)]
