"""A proxy before Redis that understands commands, and answers chosen ones itself.

``answers`` maps the names of commands to what is answered in Redis' place: an error without its
sign, as managed Redis' proxies give it. It may be changed at any time, and holds from the next
command on. What is answered so never reaches Redis. "MULTI LPUSH" holds in a transaction, which is
then refused as a whole, as Redis does it. ``swallows`` is called with the name of each other
command and Redis' reply; if it returns True, the client gets no reply, and its connection ends.
"""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable
from typing import Any, BinaryIO


class RedisProxy(socketserver.ThreadingTCPServer):
    daemon_threads = True

    def __init__(self, host: str, port: int) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.target = (host, port)
        self.port = self.server_address[1]
        self.answers: dict[str, str] = {}
        self.swallows: Callable[[str, bytes], bool] = lambda name, reply: False
        #: Commands that were answered in Redis' place.
        self.answered: list[str] = []

    def __enter__(self) -> RedisProxy:
        self._thread = threading.Thread(target=self.serve_forever, args=(0.05,))
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.shutdown()
        self._thread.join()
        self.server_close()

    def handle_error(self, *args: Any) -> None:
        """A client that goes is no error."""


class _Connection(socketserver.StreamRequestHandler):
    server: RedisProxy

    def handle(self) -> None:
        with socket.create_connection(self.server.target) as redis, redis.makefile("rb") as replies:
            prefix, aborted = "", False
            while command := _read(self.rfile):
                name = command.split(b"\r\n", 3)[2].decode().upper()
                answer = self.server.answers.get(prefix + name)
                if name == "EXEC":
                    if aborted:
                        redis.sendall(b"*1\r\n$7\r\nDISCARD\r\n")
                        _read(replies)
                        answer = "EXECABORT Transaction discarded because of previous errors."
                    prefix, aborted = "", False
                if answer is None:
                    redis.sendall(command)
                    reply = _read(replies)
                    if self.server.swallows(name, reply):
                        return
                    self.wfile.write(reply)
                    prefix = "MULTI " if name == "MULTI" else prefix
                else:
                    aborted = bool(prefix)
                    self.server.answered.append(name)
                    self.wfile.write(f"-{answer}\r\n".encode())


def _read(stream: BinaryIO) -> bytes:
    """Read one value of RESP, a command or a reply; b"" at the end."""
    line = stream.readline()
    if not line or line[:1] not in b"*$%~>=!":
        return line
    length = int(line[1:])
    if line[:1] in b"$=!":
        return line + (stream.read(length + 2) if length >= 0 else b"")
    values = length * 2 if line[:1] == b"%" else length
    return line + b"".join(_read(stream) for _ in range(values))
