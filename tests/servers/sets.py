"""Sets of servers, one for each worker of pytest-xdist.

``run --workers 3`` starts three sets and offers them to its command: a folder with a file for each
set, named in an environment variable. A worker takes the first set that no living process has, and
holds its file's lock until it ends. So whoever replaces a worker that died takes its servers over.
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
    """Variables for a command: where its workers find the sets, and the first set as its own."""
    with tempfile.TemporaryDirectory(prefix="outbox-sets-") as folder:
        for number, urls in enumerate(sets):
            Path(folder, f"{number}.json").write_text(json.dumps(dict(urls)))
        yield {VARIABLE: folder, **sets[0]}


def count() -> int:
    """How many sets are offered to this process."""
    folder = os.environ.get(VARIABLE)
    return len(list(Path(folder).iterdir())) if folder else 0


def take() -> None:
    """In a worker of pytest-xdist: take a set that is free. It becomes that of its processes, too.

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
