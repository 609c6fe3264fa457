"""Work in the foreground: arguments, signals, records of progress, and several processes.

SIGTERM and SIGINT finish what is in progress and hand the leases back. With several processes the
parent passes a stop on, and starts a new worker for each that dies. Workers are forked, so nothing
that is connected may be open before. A worker ends by itself when its parent was killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from django.db import connections

from ..conf import outbox_settings
from ..exceptions import InvalidArgument
from ..text import Write, get_logger, per_second
from .loop import ProcessLoop
from .preflight import require_alias, require_migrated, require_sessions
from .waiting import StopFlag

logger = get_logger("outbox_app.process")

#: Takes what stops a loop, and calls it when it is time.
Listen = Callable[[Callable[[], None]], None]
#: Exit code where a process died that nothing had stopped.
EXIT_DIED = 1


class Progress:
    """Logs a record every PROGRESS_INTERVAL seconds in which there was work or trouble.

    ``line`` makes message and arguments, of the loop and what was done per second. The end of the
    process ``parent`` stops the loop.
    """

    def __init__(
        self, line: Callable[[Any, float], tuple[Any, ...]], *, parent: int | None
    ) -> None:
        self.line = line
        self.parent = parent
        self.interval = outbox_settings().PROGRESS_INTERVAL
        self.at = time.monotonic()
        self.done = 0

    def __call__(self, loop: ProcessLoop) -> None:
        if self.parent is not None and os.getppid() != self.parent:
            loop.stop()  # it was killed, and can pass no stop on
        now = time.monotonic()
        if not self.interval or now - self.at < self.interval:
            return
        since, before = self.at, self.done
        self.at, self.done = now, loop.done
        if self.done != before or loop.trouble:
            loop.logger.info(*self.line(loop, per_second(self.done - before, now - since)))


def with_trouble(trouble: str, message: str, *values: Any) -> tuple[Any, ...]:
    """Return message and arguments of a record that ends with the trouble, if there is any."""
    return (f"{message} trouble=%s", *values, trouble) if trouble else (message, *values)


def throttled(write: Write) -> Write:
    """Return what writes a line of progress, at most one every PROGRESS_INTERVAL seconds."""
    interval, last = outbox_settings().PROGRESS_INTERVAL, time.monotonic()

    def tell(line: str) -> None:
        nonlocal last
        if 0 < interval <= time.monotonic() - last:
            last = time.monotonic()
            write(line)

    return tell


def require_at_least(**least: tuple[float | None, float]) -> None:
    """Refuse options that are too small; each is given with the least that it may be."""
    for name, (value, minimum) in least.items():
        if value is not None and not value >= minimum:  # NaN too
            option = f"--{name.replace('_', '-')}"
            raise InvalidArgument(f"{option} must be at least {minimum}; got {value}.")


def prepare(using: str, *, answer_seconds: float | None = None) -> None:
    """Bound the waits for a database, and refuse one in which no work is possible."""
    require_alias(using)
    set_timeouts(using, answer_seconds=answer_seconds)
    require_migrated(using)
    require_sessions(using)


def stop_on_signals(stop: Callable[[], None]) -> None:
    if threading.current_thread() is not threading.main_thread():
        return  # as of a scheduler: no signal comes here
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop())


def run_workers(
    work: Callable[..., int], *, count: int, restart: bool, final: int | None = None
) -> int:
    """Run ``work()`` here, or ``work(parent=pid)`` in ``count`` processes until all have ended.

    With ``restart`` a new process is started for each that dies, but not where the exit code of
    ``work`` is ``final``. Returns the exit code; of several processes 0, ``final``, or 1 where one
    died and was not replaced.
    """
    if count == 1:
        return work()
    connections.close_all()  # a forked child must not share a connection
    context, parent = multiprocessing.get_context("fork"), os.getpid()
    stopping = StopFlag()
    # Before the first fork: a signal that comes too early must not leave orphans behind.
    stop_on_signals(stopping.set)

    def start() -> bool:
        child = context.Process(target=lambda: sys.exit(work(parent=parent)))
        try:
            child.start()
        except OSError as error:  # no memory, or too many processes: the others go on meanwhile
            logger.error("Process cannot be started error=%r", error)
            stopping.wait(1)
            return False
        children.append(child)
        return True

    children: list[Any] = []
    missing, code = count, 0
    while children or (missing and not stopping.is_set()):
        while missing and not stopping.is_set() and start():
            missing -= 1
        for child in list(children):
            child.join(timeout=0.1)
            if child.exitcode is None:
                if stopping.is_set():  # again and again: a new child may not listen yet
                    child.terminate()
                continue
            children.remove(child)
            if final is not None and child.exitcode == final:
                code = final
            elif child.exitcode and not stopping.is_set():
                logger.error("Process died pid=%d exit_code=%d", child.pid, child.exitcode)
                if not restart:
                    code = code or EXIT_DIED
                else:
                    time.sleep(1)
                    missing += 1
    return code


def set_timeouts(using: str, *, answer_seconds: float | None = None) -> None:
    """Bound connecting, and answers where the driver can: its default is to wait for ever.

    Django's pool is left out. A loop keeps one or two connections for life, so a pool would be too
    small for some of them, and workers that are forked would share what is open in it.
    """
    timeout = max(1, int(outbox_settings().LEASE_SECONDS))
    answer = int(answer_seconds or timeout)
    bounds = {
        "postgresql": {"connect_timeout": timeout},
        "mysql": {"connect_timeout": timeout, "read_timeout": answer, "write_timeout": timeout},
    }
    options = connections[using].settings_dict.setdefault("OPTIONS", {})
    options.pop("pool", None)
    for name, seconds in bounds.get(connections[using].vendor, {}).items():
        options.setdefault(name, seconds)
