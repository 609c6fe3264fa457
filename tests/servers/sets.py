"""Sets of servers, one for each worker of pytest-xdist.

``run --workers 3`` starts three sets and offers them to its command: an environment variable names
a folder with a file for each set. A worker takes the first set that no living process has, and
locks its file until it ends. So the replacement of a worker that died takes over its servers.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

VARIABLE = "OUTBOX_TEST_SERVERS"


@contextlib.contextmanager
def offered(sets: Sequence[Mapping[str, str]]) -> Iterator[dict[str, str]]:
    """Yield the variables of a command: the folder of the sets, and the first set for itself."""
    with tempfile.TemporaryDirectory(prefix="outbox-sets-") as folder:
        for number, urls in enumerate(sets):
            Path(folder, f"{number}.json").write_text(json.dumps(dict(urls)))
        yield {VARIABLE: folder, **sets[0]}


def count() -> int:
    """Return how many sets are offered to this process."""
    folder = os.environ.get(VARIABLE)
    return len(list(Path(folder).iterdir())) if folder else 0


def take() -> None:
    """In a worker of pytest-xdist, take a free set, for this process and those that it starts.

    Raises:
        RuntimeError: Each set has a worker.
    """
    if not count() or "PYTEST_XDIST_WORKER" not in os.environ:
        return
    for path in sorted(Path(os.environ.pop(VARIABLE)).iterdir()):
        file = path.open()
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.close()
            continue
        atexit.register(file.close)
        os.environ.update(json.load(file))
        return
    raise RuntimeError("each set of servers has a worker; start more: run --workers N")
