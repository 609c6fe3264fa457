"""Processes that make ids at once, forked from one that makes some itself, as gunicorn preloads.

``python -m tests.ids.maker FOLDER PROCESSES IDS``: each process, and each of four threads in the
first one, writes its ids to a file of its own. Some of the processes are stopped for a moment.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from array import array
from pathlib import Path
from threading import Thread

import django


def write(file: Path, count: int) -> None:
    from outbox_app.ids import snowflake, snowflakes

    made = array("Q")
    while len(made) < count:
        made.extend(snowflake() for _ in range(100))
        made.extend(snowflakes(900))
    file.write_bytes(made.tobytes())


def main(folder: Path, processes: int, count: int) -> None:
    from outbox_app.ids.generator import _ids

    write(folder / "preloaded", 1000)
    children = []
    for number in range(processes):
        if not (child := os.fork()):
            write(folder / str(number), count)
            _ids.give_back()
            os._exit(0)
        children.append(child)
    for child in children[:4]:
        os.kill(child, signal.SIGSTOP)
    threads = [Thread(target=write, args=(folder / f"thread-{n}", count)) for n in range(4)]
    for thread in threads:
        thread.start()
    time.sleep(0.05)
    for child in children[:4]:
        os.kill(child, signal.SIGCONT)
    for thread in threads:
        thread.join()
    failed = [child for child in children if os.waitpid(child, 0)[1]]
    sys.exit(len(failed))


if __name__ == "__main__":
    django.setup()
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
