"""Free ports and short-lived folders for servers.

Ports lie below the range of outgoing connections. From within that range a client that tries
to reconnect to a killed server can be given the very port of the server as its own: it is then
connected to itself, and the server cannot start again.
"""

from __future__ import annotations

import random
import shutil
import socket
import tempfile
from pathlib import Path

# Test runners seed the global generator, which makes all runs choose alike.
_random = random.SystemRandom()
_given: set[int] = set()


def free_port() -> int:
    """A port of 127.0.0.1 that is free now and that this process has not been given before."""
    while True:
        port = _random.randrange(20000, 32000)
        if port not in _given and _is_free(port):
            _given.add(port)
            return port


def make_folder(name: str, user: str | None) -> Path:
    """A new folder that belongs to the user and is short enough for the path of a socket."""
    parent = tempfile.gettempdir()
    steps = [Path(parent), *Path(parent).parents]
    is_closed = user and not all(step.stat().st_mode & 0o001 for step in steps)
    if is_closed or len(parent) > 60:  # A socket path holds at most 107 bytes.
        parent = "/tmp"
    folder = tempfile.mkdtemp(prefix=f"outbox-{name}-", dir=parent)
    if user:
        shutil.chown(folder, user)
    return Path(folder)


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
