"""The broker goes away between two sends: what was not sent is not in doubt (P5)."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Iterator
from contextlib import suppress

import pytest
from django.db import transaction

from outbox_app.failpoints import set_failpoint
from outbox_app.jobs.drain.drain import Drain
from outbox_app.models import Incident, StagedJob
from tests import tasks

from .redis_proxy import _read

pytestmark = pytest.mark.django_db(transaction=True)

ANSWERS = {
    b"EXEC": b"*2\r\n:1\r\n:1\r\n",  # two additions to sets
    b"HELLO": b"%1\r\n$5\r\nproto\r\n:3\r\n",
    b"INFO": b"$27\r\nmaxmemory_policy:noeviction\r\n",
    b"PING": b"+PONG\r\n",
}


class Connection(socketserver.StreamRequestHandler):
    server: EmptyRedis

    def handle(self) -> None:
        self.server.opened.append(self)
        while command := _read(self.rfile):
            name = command.split(b"\r\n", 3)[2].upper()
            self.server.commands.append(name)
            self.wfile.write(ANSWERS.get(name, b":0\r\n"))


class EmptyRedis(socketserver.ThreadingTCPServer):
    """Answers as an empty Redis does, until it goes away."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Connection)
        self.opened: list[Connection] = []
        self.commands: list[bytes] = []
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        self._thread.start()

    def go_away(self) -> None:
        if self._thread.is_alive():
            self.shutdown()
            self._thread.join()
            self.socket.close()
            for each in self.opened:
                with suppress(OSError):  # the client has closed it
                    each.connection.shutdown(socket.SHUT_RDWR)
            self.server_close()  # waits for the threads of the connections


@pytest.fixture
def redis() -> Iterator[EmptyRedis]:
    server = EmptyRedis()
    yield server
    server.go_away()


@pytest.mark.parametrize("passes", [1, 2])
def test_a_refused_connection_is_no_incident(alias, passes, redis, make_app):
    """Whichever kombu: before 5.7 it has no batches, and sends each message by itself."""
    app = make_app(f"redis://127.0.0.1:{redis.server_address[1]}/0")
    note = app.task(name="note")(tasks.note)
    with transaction.atomic(using=alias):
        note.delay("", 1)
    drain = Drain(using=alias)
    passed = iter(range(1, passes + 1))
    set_failpoint("checked", lambda: redis.go_away() if next(passed, 0) == passes else None)
    try:
        while not drain.trouble and not drain.done:
            drain.run_once()
    finally:
        set_failpoint("checked", None)

    assert "Connection refused" in drain.trouble
    assert b"INFO" in redis.commands
    assert b"LPUSH" not in redis.commands
    assert StagedJob.objects.using(alias).count() == 1
    assert not Incident.objects.using(alias).exists()
    drain.holder.leave()
