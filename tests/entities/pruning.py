"""A pruner that is killed before each of its statements in turn, for ``test_pruned``.

``python -m tests.entities.pruning ALIAS [ARCHIVE]`` forks one process after the other. Each prunes
the versions of accounts, two at a time, and the n-th kills itself before its n-th statement, or the
COMMIT that stands in its place. It prints ``killed`` for each, and ends once one has finished.
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

import django


def main(alias: str, archive: str | None = None) -> None:
    django.setup()
    count, code = 0, -signal.SIGKILL
    while code == -signal.SIGKILL:
        count += 1
        child = os.fork()
        if not child:
            _prune(alias, archive, count)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print("killed" if code else "done", flush=True)
        sys.stdin.readline()
    sys.exit(code)


def _prune(alias: str, archive: str | None, left: int) -> None:
    code = 1
    try:
        from django.db import connections

        from outbox_app.events import prune_events

        connection: Any = connections[alias]
        commit = connection._commit

        def count() -> None:
            nonlocal left
            left -= 1
            if not left:
                os.kill(os.getpid(), signal.SIGKILL)

        def execute_counted(execute: Any, *given: Any) -> Any:
            count()
            return execute(*given)

        def commit_counted() -> None:
            count()
            commit()
            count()

        connection._commit = commit_counted
        with connection.execute_wrapper(execute_counted):
            prune_events(
                using=alias, log="account_version", older_than=1, batch_size=2, archive=archive
            )
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    main(*sys.argv[1:])
