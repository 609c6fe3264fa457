"""An archiver to be killed: without Spark, and each run in a process of its own.

``python -m tests.pipeline.archiver OPTIONS FOLDER ROWS``: for each line on its standard input, a
failpoint and how often it is passed before, it forks a process that archives what is there and
kills itself at that point, as SIGKILL does. It answers with what became of it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import traceback

from outbox_app.failpoints import set_failpoint
from outbox_app.pipeline import compaction
from outbox_app.pipeline.archiver import Archiver
from outbox_app.pipeline.database import connect
from outbox_app.pipeline.options import Options

from . import shared_types
from .local_context import LocalContext

#: So few files are put together that it happens all the time.
FILES = 3


def main(options: str, folder: str, rows: str) -> None:
    compaction.FILES = FILES
    shared_types.share()
    connect(Options(**json.loads(options))).close()  # read the types before the first fork
    for line in sys.stdin:
        point, passes = line.split()
        child = os.fork()
        if child == 0:
            _archive(Options(**json.loads(options)), folder, int(rows), point, int(passes))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print({0: "done", -signal.SIGKILL: "killed"}.get(status, f"failed {status}"), flush=True)


def _archive(options: Options, folder: str, rows: int, point: str, passes: int) -> None:
    left = passes

    def act() -> None:
        nonlocal left
        left -= 1
        if left < 0:
            os.kill(os.getpid(), signal.SIGKILL)

    set_failpoint(point, act)
    try:
        Archiver(LocalContext(), options, folder, max_rows=rows).run()
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        os._exit(1)


if __name__ == "__main__":
    main(*sys.argv[1:])
