"""HTTP/1.1 over connections that are kept: one request and its answer, within one deadline.

Every wait has the time that is left of the deadline: for a name, a connection, a handshake, and
each part that is sent or received. So a peer that sends a byte a second cannot extend it. There are
no redirects, cookies or proxies. A connection belongs to one call at a time, and to the process
that has opened it.
"""

from __future__ import annotations

import atexit
import http.client
import io
import os
import socket
import ssl
import time
from collections import defaultdict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import lru_cache
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

#: Concurrent look-ups of names. One cannot be cancelled, and others must not wait behind it.
NAMES = 256
#: Seconds after which an idle connection is not used again. Servers close it after two at the
#: earliest.
IDLE = 1.0
#: Characters of a path and a query that are sent as they are: what is escaped is not escaped anew.
SENT = "%/:@!$&'()*+,;=?"


class NotConnected(OSError):
    """There is no connection: the request was certainly not sent."""


class Target(NamedTuple):
    """What a URL names: the server, as ``Host`` has it, and what is asked of it."""

    scheme: str
    host: str
    port: int
    authority: str
    path: str


def target_of(url: str) -> Target:
    """Return the parts of a URL, as they are sent. Raises ``NotConnected``."""
    parts = urlsplit(url)
    try:
        host = (parts.hostname or "").encode("idna").decode()
        usual = http.client.HTTPS_PORT if parts.scheme == "https" else http.client.HTTP_PORT
        port = parts.port or usual
    except ValueError as error:
        raise NotConnected(f"{url!r} is no URL: {error}.") from error
    named = f"[{host}]" if ":" in host else host
    path = quote(parts.path or "/", SENT) + (f"?{quote(parts.query, SENT)}" if parts.query else "")
    return Target(parts.scheme, host, port, named if port == usual else f"{named}:{port}", path)


def exchange(
    target: Target,
    method: str,
    headers: Any,
    body: bytes,
    *,
    connect: float,
    until: float,
    most: int,
) -> tuple[int, http.client.HTTPMessage, bytes]:
    """Send a request; return status, headers and body of its answer.

    Args:
        connect: Seconds to connect.
        until: The deadline, by the monotonic clock.
        most: The limit of the answer in bytes.

    Raises:
        NotConnected: The request was not sent.
        OSError, http.client.HTTPException: There is no whole answer.
    """
    idle = _idle[os.getpid(), *target[:3]]
    stream = _kept(idle) or _Stream(target, min(time.monotonic() + connect, until))
    stream.until = until
    is_whole = False
    try:
        connection = http.client.HTTPConnection(target.host, target.port)
        connection.sock, connection.response_class = stream, _Response
        with suppress(BrokenPipeError, ConnectionResetError):  # it may have refused the body
            connection.request(method, target.path, body, headers)
        response = connection.getresponse()
        answer = response.read(most + 1)
        if len(answer) > most:
            raise OSError(f"The answer has more than {most} bytes.")
        if response.length:
            raise http.client.IncompleteRead(answer, response.length)
        is_whole = response.isclosed() and not response.will_close
    finally:
        if is_whole:
            idle.append((time.monotonic(), stream))
        else:
            stream.socket.close()
    return response.status, response.headers, answer


#: The idle connections of each process to each server, those that were used last at the end. A
#: child leaves those of its parent, which uses them.
_idle: dict[Any, deque[tuple[float, _Stream]]] = defaultdict(deque)


def _kept(idle: deque[tuple[float, _Stream]]) -> _Stream | None:
    """Return a connection that can be used again, and close those that cannot."""
    _close_idle(IDLE)
    with suppress(IndexError):
        while True:
            _, stream = idle.pop()
            if stream.is_silent():
                return stream
            stream.socket.close()
    return None


def _close_idle(seconds: float) -> None:
    """Close connections that are idle for so long, also to servers that are called no more."""
    for (process, *_), idle in list(_idle.items()):
        with suppress(IndexError):
            while process == os.getpid() and time.monotonic() - idle[0][0] >= seconds:
                idle.popleft()[1].socket.close()


class _Response(http.client.HTTPResponse):
    """The final answer: ``http.client`` reads past ``100 Continue``, here also past other 1xx.

    RFC 9110, 15.2: there may be several of them, also where none was expected.
    """

    def _read_status(self) -> tuple[str, int, str]:
        version, status, reason = super()._read_status()  # type: ignore[misc]
        return version, http.client.CONTINUE if status < 200 else status, reason


class _Stream:
    """A connection, in the place of the socket of ``http.client``."""

    def __init__(self, target: Target, until: float) -> None:
        self.until = until
        try:
            self.socket = self._connected(target)
        except TimeoutError as error:
            raise NotConnected(f"No connection to {target.authority} in time.") from error
        except (OSError, UnicodeError) as error:
            raise NotConnected(*error.args) from error
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def _connected(self, target: Target) -> socket.socket:
        found = _addresses(target.host, target.port, self.left())
        for number, (family, kind, protocol, _, address) in enumerate(found):
            made = socket.socket(family, kind, protocol)
            try:
                # An address that does not answer leaves time to the others.
                made.settimeout(self.left() / (len(found) - number))
                made.connect(address)
                if target.scheme != "https":
                    return made
                made.settimeout(self.left())
                return _context().wrap_socket(made, server_hostname=target.host)
            except BaseException as error:
                made.close()
                if not isinstance(error, OSError) or number + 1 == len(found):
                    raise
        raise OSError(f"{target.host} has no address.")

    def left(self) -> float:
        if (left := self.until - time.monotonic()) <= 0:
            raise TimeoutError
        return left

    def sendall(self, data: Any) -> None:
        rest = memoryview(data)
        while rest:
            self.socket.settimeout(self.left())
            rest = rest[self.socket.send(rest) :]

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(_Received(self))

    def is_silent(self) -> bool:
        """Return whether the server has neither closed the connection nor sent what none asked."""
        self.socket.settimeout(0)
        try:
            self.socket.recv(1)
        except (BlockingIOError, ssl.SSLWantReadError):
            return True
        except OSError:
            pass
        return False

    def close(self) -> None:
        """Close nothing: ``http.client`` calls this before it reads the last answer."""


class _Received(io.RawIOBase):
    """What one answer is read from. Its end does not close the connection."""

    def __init__(self, stream: _Stream) -> None:
        self.stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        self.stream.socket.settimeout(self.stream.left())
        return self.stream.socket.recv_into(buffer)


@lru_cache(maxsize=1)
def _context() -> ssl.SSLContext:
    return ssl.create_default_context()


@lru_cache(maxsize=1)
def _names(process: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(NAMES, "outbox-names")


def _addresses(host: str, port: int, seconds: float) -> list[Any]:
    asked = host, port, 0, socket.SOCK_STREAM
    try:
        socket.inet_pton(socket.AF_INET6 if ":" in host else socket.AF_INET, host)
    except OSError:  # a name
        # At its end the interpreter has ended the executor's threads.
        with suppress(RuntimeError):
            return _names(os.getpid()).submit(socket.getaddrinfo, *asked).result(seconds)
    return socket.getaddrinfo(*asked)


atexit.register(_close_idle, 0)
