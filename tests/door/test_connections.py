"""Connections that are kept, and what a server may do with them."""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPException
from typing import Any

import pytest

from outbox_app.door import connections
from tests.patience import eventually, patience

pytestmark = pytest.mark.unit


@pytest.fixture
def new_client(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget all connections, as in a process that has called no peer yet."""
    monkeypatch.setattr(connections, "_idle", defaultdict(deque))
    monkeypatch.setattr(connections, "IDLE", patience())  # however slow this host is
    yield
    for idle in connections._idle.values():
        for _, stream in idle:
            stream.socket.close()


def test_an_address_that_does_not_answer_leaves_time_to_the_next(
    new_client: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where a host has an IPv6 address that is not routed."""
    with socket.create_server(("127.0.0.1", 0)) as none:
        gone = none.getsockname()
    with socket.create_server(("127.0.0.1", 0)) as there:
        addresses = gone, there.getsockname()
        both = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", each) for each in addresses]
        monkeypatch.setattr(connections, "_addresses", lambda *args: both)
        target = connections.target_of("http://shop.example/outbox/")
        stream = connections._Stream(target, time.monotonic() + patience())
        assert stream.socket.getpeername() == there.getsockname()
        stream.socket.close()


class Kept:
    """A server that keeps connections, and answers as it is told."""

    ANSWER = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"

    def __init__(self) -> None:
        self.server = socket.create_server(("127.0.0.1", 0))
        self.target = connections.target_of(f"http://127.0.0.1:{self.server.getsockname()[1]}/x")
        self.accepted: list[socket.socket] = []
        self.answer = self.ANSWER
        threading.Thread(target=self.accept, daemon=True).start()

    def accept(self) -> None:
        with suppress(OSError):
            while True:
                connection, _ = self.server.accept()
                self.accepted.append(connection)
                threading.Thread(target=self.serve, args=[connection], daemon=True).start()

    def serve(self, connection: socket.socket) -> None:
        with suppress(OSError):
            while b"\r\n\r\n" in connection.recv(65536):
                connection.sendall(self.answer)

    def ask(self, **options: Any) -> Any:
        times = {"connect": patience(), "until": time.monotonic() + patience(), "most": 100}
        return connections.exchange(self.target, "GET", {}, b"", **times | options)

    def close(self) -> None:
        self.server.shutdown(socket.SHUT_RDWR)
        self.server.close()
        for each in self.accepted:
            each.close()


@pytest.fixture
def kept(new_client: None) -> Iterator[Kept]:
    server = Kept()
    yield server
    server.close()


def test_a_connection_is_used_again(kept: Kept) -> None:
    """By one call at a time; and by this process only."""
    for _ in range(3):
        status, headers, body = kept.ask()
        assert (status, headers["Content-Length"], body) == (200, "2", b"{}")
    assert len(kept.accepted) == 1
    [idle] = connections._idle.values()
    taken = idle.pop()
    kept.ask()
    idle.append(taken)
    assert (len(kept.accepted), len(idle)) == (2, 2)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "getpid", lambda: -1)
        kept.ask()
    assert len(kept.accepted) == 3


@pytest.mark.parametrize("host", ["::1", "fd00::a"])
def test_an_ipv6_address(kept: Kept, monkeypatch: pytest.MonkeyPatch, host: str) -> None:
    """Is no host with a port, whatever its last part is."""
    there = (socket.AF_INET, socket.SOCK_STREAM, 0, "", kept.server.getsockname())
    monkeypatch.setattr(connections, "_addresses", lambda *args: [there])
    kept.target = connections.target_of(f"http://[{host}]:8000/x")
    assert kept.ask()[0] == 200


@pytest.mark.parametrize("reason", ["old", "closed", "more than was asked"])
def test_a_connection_that_is_not_used_again(
    kept: Kept, monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    kept.ask()
    [[(_, stream)]] = connections._idle.values()
    if reason == "old":
        monkeypatch.setattr(connections, "IDLE", 0)
    elif reason == "closed":
        kept.accepted[0].shutdown(socket.SHUT_RDWR)
    else:
        kept.accepted[0].sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    if reason != "old":
        eventually(lambda: not stream.is_silent())
    kept.ask()
    assert len(kept.accepted) == 2
    assert stream.socket.fileno() == -1


def test_connections_that_are_needed_no_more(kept: Kept) -> None:
    """Are closed although others, which were used later, are enough: as after a burst."""
    kept.ask()
    [idle] = connections._idle.values()
    since, stream = idle.pop()
    kept.ask()
    idle.appendleft((since - connections.IDLE, stream))
    kept.ask()
    assert stream.socket.fileno() == -1
    assert (len(kept.accepted), len(idle)) == (2, 1)


def test_connections_to_a_server_that_is_called_no_more(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Are closed when another one is opened, once they are old; not those of a parent process."""
    kept.ask()
    [[(since, stream)]] = connections._idle.values()
    connections._idle[-1, "http", "shop.example", 80].append((since, stream))
    connections._close_idle(connections.IDLE)
    assert stream.socket.fileno() != -1
    monkeypatch.setattr(connections, "IDLE", 0)
    other = connections.target_of("http://127.0.0.1:1/")
    with pytest.raises(connections.NotConnected):
        connections.exchange(other, "GET", {}, b"", connect=1, until=time.monotonic() + 1, most=1)
    assert stream.socket.fileno() == -1
    assert len(connections._idle[-1, "http", "shop.example", 80]) == 1


ANSWERS: dict[str, tuple[bytes, type[Exception] | bytes]] = {
    "by parts": (
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n",
        b"{}",
    ),
    "empty": (b"HTTP/1.1 204 No Content\r\n\r\n", b""),
    "after another": (b"HTTP/1.1 100 Continue\r\n\r\n" + Kept.ANSWER, b"{}"),
    "after other ones": (
        b"HTTP/1.1 102 Processing\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
        + Kept.ANSWER,
        b"{}",
    ),
    "another protocol": (b"HTTP/1.1 101 Switching Protocols\r\n\r\nSSH-2.0\r\n", HTTPException),
    "too large": (b"HTTP/1.1 200 OK\r\nContent-Length: 101\r\n\r\n" + b"x" * 101, OSError),
    "too many headers": (b"HTTP/1.1 200 OK\r\n" + b"A: b\r\n" * 200 + b"\r\n", HTTPException),
    "no HTTP": (b"SSH-2.0-OpenSSH\r\n\r\n", HTTPException),
}


@pytest.mark.parametrize(("answer", "wanted"), ANSWERS.values(), ids=ANSWERS)
def test_answers(kept: Kept, answer: bytes, wanted: Any) -> None:
    """A connection whose answer was not read to its end is not used again."""
    kept.answer = answer
    if isinstance(wanted, bytes):
        assert kept.ask()[2] == wanted
    else:
        with pytest.raises(wanted):
            kept.ask()
    is_kept = any(connections._idle.values())
    assert is_kept == isinstance(wanted, bytes)


def test_an_answer_that_is_broken_off(kept: Kept) -> None:
    kept.answer = kept.ANSWER[:-1]
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(kept.ask)
        eventually(lambda: kept.accepted)
        kept.accepted[0].shutdown(socket.SHUT_WR)
        with pytest.raises(HTTPException):
            asked.result()
    assert not any(connections._idle.values())


def test_a_peer_that_reads_nothing_ends_no_call_late(new_client: None) -> None:
    """Each part that is sent has only the time that is left."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        target = connections.target_of(f"http://127.0.0.1:{server.getsockname()[1]}/")
        until = time.monotonic() + patience(0.5)
        with pytest.raises(TimeoutError):
            connections.exchange(
                *(target, "POST", {}, b"x" * 50_000_000), connect=patience(), until=until, most=1
            )


@pytest.mark.parametrize(
    ("url", "authority", "path"),
    [
        ("https://shop.example/outbox/x?a=%20", "shop.example", "/outbox/x?a=%20"),
        ("https://shop.example:443/", "shop.example", "/"),
        ("http://Shop.example:443/", "shop.example:443", "/"),
        ("http://[::1]:8000/%6F", "[::1]:8000", "/%6F"),
        ("http://shop.example/a b/ä?q=ü%20", "shop.example", "/a%20b/%C3%A4?q=%C3%BC%20"),
        ("https://bücher.example/", "xn--bcher-kva.example", "/"),
    ],
)
def test_what_a_url_names(url: str, authority: str, path: str) -> None:
    target = connections.target_of(url)
    assert (target.authority, target.path) == (authority, path)
