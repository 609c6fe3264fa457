"""``kill_trees`` also ends children that a process starts while it is being stopped."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from tests.servers.processes import kill_trees

# With much memory fork() takes milliseconds, and a stop that arrives within it waits for its end.
FORKS = """
import os, time
memory = bytearray(b"x") * 200_000_000
print(flush=True)
while os.fork():
    pass
time.sleep(60)
"""


@pytest.mark.parametrize("delay", [0.01 * number for number in range(8)])
def test_nothing_is_left_of_a_process_that_forks(delay: float) -> None:
    with subprocess.Popen([sys.executable, "-S", "-c", FORKS], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(delay)
        kill_trees([process.pid])
        # Raises TimeoutExpired while any process still has the pipe.
        process.communicate(timeout=30)
