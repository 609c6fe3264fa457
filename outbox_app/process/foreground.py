"""Several processes in the foreground: the parent passes a stop on, and replaces what dies.

Children are forked, so nothing that is connected may be open before. A child ends by itself when
its parent was killed: it is told the parent's process id.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from typing import Any

from django.db import connections

from ..conf import outbox_settings

#: Exit code where a process died of what it was not told to.
EXIT_DIED = 1


def in_children(
    work: Callable[..., int],
    *,
    count: int,
    restart: bool,
    write: Callable[[str], Any],
    final: int | None = None,
) -> int:
    """Run ``work(parent=pid)`` in processes of its own until all have ended.

    Args:
        work: Returns an exit code.
        count: How many processes.
        restart: Start a new one for each that dies.
        write: Takes lines for people.
        final: An exit code that no restart will change; it becomes the result.

    Returns:
        0, ``final``, or 1 where a process died and was not replaced.
    """
    connections.close_all()  # a forked child must not share a connection
    context = multiprocessing.get_context("fork")
    stopping = False

    def stop(number: int, frame: Any) -> None:
        nonlocal stopping
        stopping = True

    # Before the first fork: a signal that comes too early must not leave orphans behind.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)

    def start() -> Any:
        child = context.Process(target=_child, args=(work, os.getpid()))
        child.start()
        return child

    children = [start() for _ in range(count)]
    code = 0
    while children:
        for child in list(children):
            child.join(timeout=0.1)
            if child.exitcode is None:
                if stopping:  # again and again: a new child may not listen yet
                    child.terminate()
                continue
            children.remove(child)
            if final is not None and child.exitcode == final:
                code = final
            elif child.exitcode and not stopping:
                write(f"process died pid={child.pid} exit_code={child.exitcode}")
                if not restart:
                    code = code or EXIT_DIED
                else:
                    time.sleep(1)
                    children.append(start())
    return code


def bound_waits(using: str) -> None:
    """Bound connecting, and answers where the driver can: its default is to wait for ever."""
    timeout = max(1, int(outbox_settings().LEASE_SECONDS))
    bounds = {
        "postgresql": ["connect_timeout"],
        "mysql": ["connect_timeout", "read_timeout", "write_timeout"],
    }
    options = connections[using].settings_dict.setdefault("OPTIONS", {})
    for name in bounds.get(connections[using].vendor, []):
        options.setdefault(name, timeout)


def _child(work: Callable[..., int], parent: int) -> None:
    raise SystemExit(work(parent=parent))
