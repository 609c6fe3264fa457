"""Free ports and short-lived folders for servers.

The ports are below the range of outgoing connections. Inside that range, a client that reconnects
to a killed server can get the server's port as its own: the client is then connected to itself, and
the server cannot start again.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import tempfile
from pathlib import Path

#: This variable names the parent folder of the servers' folders. Default: that of temporary files.
VARIABLE = "OUTBOX_TEST_FOLDER"
_MEMORY = Path("/dev/shm")
#: Three sets of servers, with the rows of the tests, need less than half of this.
_ENOUGH_BYTES = 8 * 2**30
# Test runners seed the global generator, so all runs would choose the same ports.
_random = random.SystemRandom()
_given: set[int] = set()


def free_port() -> int:
    """Return a port of 127.0.0.1 that is free, and that this process has not chosen before."""
    while True:
        port = _random.randrange(20000, 32000)
        if port not in _given and _is_free(port):
            _given.add(port)
            return port


def folder_of_servers() -> str:
    """Return the parent folder of the files of servers and of the tests' SQLite."""
    return os.environ.get(VARIABLE) or tempfile.gettempdir()


def in_memory() -> dict[str, str]:
    """Return the variable that puts servers into memory, if this machine has enough of it.

    PostgreSQL creates and removes dozens of files for each TRUNCATE, which ends each test: in
    memory this takes a third of the time. A killed server finds its files again, as on a disk.
    """
    if not _MEMORY.is_dir() or not os.access(_MEMORY, os.W_OK):
        return {}
    available = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(), re.M)
    free = min(int(available[1]) * 1024 if available else 0, shutil.disk_usage(_MEMORY).free)
    return {VARIABLE: str(_MEMORY)} if free >= _ENOUGH_BYTES else {}


def make_folder(name: str, user: str | None) -> Path:
    """Create a folder that belongs to the user, with a path short enough for a socket in it."""
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
