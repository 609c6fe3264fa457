"""Free ports and short-lived folders for servers.

Ports lie below the range of outgoing connections. From within that range a client that tries
to reconnect to a killed server can be given the very port of the server as its own: it is then
connected to itself, and the server cannot start again.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import tempfile
from pathlib import Path

#: Names the folder in which those of the servers are made. Default: that for temporary files.
VARIABLE = "OUTBOX_TEST_FOLDER"
_MEMORY = Path("/dev/shm")
#: Three sets of servers and what the tests write into them need less than half of it.
_ENOUGH_BYTES = 8 * 2**30
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


def folder_of_servers() -> str:
    """Where servers, and the tests' SQLite, keep what need not outlive them."""
    return os.environ.get(VARIABLE) or tempfile.gettempdir()


def in_memory() -> dict[str, str]:
    """The variable that lets servers live in memory, where this machine has plenty of it.

    PostgreSQL makes and removes dozens of files for each TRUNCATE, the end of each test: that takes
    a third of the time there. A server that is killed finds its files again, as on a disk.
    """
    if not _MEMORY.is_dir() or not os.access(_MEMORY, os.W_OK):
        return {}
    available = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    free = min(int(available[1]) * 1024 if available else 0, shutil.disk_usage(_MEMORY).free)
    return {VARIABLE: str(_MEMORY)} if free >= _ENOUGH_BYTES else {}


def make_folder(name: str, user: str | None) -> Path:
    """A new folder that belongs to the user and is short enough for the path of a socket."""
    parent = folder_of_servers()
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
