"""The servers that a command's tests need: ``run --needed -- python -m pytest tests/entities``.

The tests are collected first, and ``tests.needs`` says what they need. A command that names no file
and no folder runs nearly all tests: they need all servers, and are collected once.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Collection, Sequence
from pathlib import Path

#: Names a file that collecting tests writes the needed servers to.
FILE = "OUTBOX_TEST_NEEDS"
#: Names the servers that were chosen for tests: a test that misses another one fails.
CHOSEN = "OUTBOX_TEST_SERVERS_CHOSEN"


def needed(command: Sequence[str], servers: Collection[str]) -> set[str] | None:
    """Return the servers that a command's tests need, or None if that cannot be said.

    Args:
        command: A command that runs pytest.
        servers: The names of those that can be started. The tests are collected as if all were
            there, because what is there decides which tests are run.
    """
    arguments = command[command.index("pytest") + 1 :] if "pytest" in command else []
    if not any(Path(argument.partition("::")[0]).exists() for argument in arguments):
        return None
    places = {f"{name.upper()}_URL": f"{name}://127.0.0.1:1/collected" for name in servers}
    with tempfile.TemporaryDirectory(prefix="outbox-needs-") as folder:
        file = Path(folder, "needs")
        collected = subprocess.run(
            [*command, "--collect-only", "-qq", "-n0"],
            env={**places, **os.environ, FILE: str(file)},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            check=False,
        )
        # The run itself will say what is wrong with the tests or the options.
        return set(file.read_text().split()) if collected.returncode in {0, 5} else None
