"""Work in the foreground: arguments, signals, records of progress, and several processes.

On SIGTERM or SIGINT a process finishes the work in progress and hands its leases back. With several
processes the parent passes the stop on, and starts a new worker for each that dies. Workers are
forked, so no connection may be open before that. A worker stops by itself if its parent was killed.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from django.db import connections
from django.db.models import Model

from ..conf import outbox_settings
from ..exceptions import InvalidArgument
from ..models import StagedJob
from ..text import Write, get_logger, per_second
from .loop import ProcessLoop, require_no_transaction
from .preflight import require_alias, require_migrated, require_sessions
from .waiting import StopFlag

logger = get_logger("outbox_app.process")

#: A function that is given the ``stop`` of a loop, and calls it when the loop has to end.
Listen = Callable[[Callable[[], None]], None]
#: The exit code if a process died without having been stopped.
EXIT_DIED = 1
#: Seconds between two records of progress.
PROGRESS_INTERVAL = 10.0
#: Whether other code goes on in this process after the command, and beside it in other threads.
_is_called: ContextVar[bool] = ContextVar("is_called", default=False)


def progress(
    line: Callable[[Any, float], tuple[Any, ...]], *, parent: int | None
) -> Callable[[Any], None]:
    """Return an ``on_turn`` that logs work and trouble every PROGRESS_INTERVAL seconds, if any.

    ``line`` returns its message and arguments, for the loop and the work done per second. When the
    process ``parent`` has ended, the loop is stopped.
    """
    logged_at, logged = time.monotonic(), 0

    def on_turn(loop: ProcessLoop) -> None:
        nonlocal logged_at, logged
        if parent is not None and os.getppid() != parent:
            loop.stop()  # the parent was killed, and cannot pass a stop on
        seconds, done = time.monotonic() - logged_at, loop.done - logged
        if seconds >= PROGRESS_INTERVAL:
            logged_at, logged = logged_at + seconds, logged + done
            if done or loop.trouble:
                loop.report(*line(loop, per_second(done, seconds)))

    return on_turn


def throttled(write: Write) -> Write:
    """Return a function that writes at most one line of progress per PROGRESS_INTERVAL seconds."""
    last = time.monotonic()

    def tell(line: str) -> None:
        nonlocal last
        if time.monotonic() - last >= PROGRESS_INTERVAL:
            last = time.monotonic()
            write(line)

    return tell


def require_at_least(**least: tuple[float | None, float]) -> None:
    """Refuse options that are too small; each is given as its value and the smallest allowed."""
    for name, (value, minimum) in least.items():
        if value is not None and not value >= minimum:  # NaN too
            option = f"--{name.replace('_', '-')}"
            raise InvalidArgument(f"{option} must be at least {minimum}; got {value}.")


def prepare_process(using: str, *models: type[Model], answer_seconds: float | None = None) -> None:
    """Set the timeouts of a database, and refuse one in which no work is possible.

    It needs the tables of jobs, and of these models.
    """
    require_alias(using)
    require_no_transaction(using)
    # Until there is work to finish: process 1 has no default handlers. Those of run_together stay.
    if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
        stop_on_signals(sys.exit)
    set_timeouts(using, answer_seconds=answer_seconds)
    needed: tuple[type[Model], ...] = (StagedJob, *models)
    for model in needed:
        require_migrated(using, model)
    require_sessions(using)


def stop_on_signals(stop: Callable[[], None]) -> None:
    if threading.current_thread() is not threading.main_thread():
        return  # a scheduler's, for example: signals only reach the main thread
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop())


def run_workers(
    work: Callable[..., int], *, count: int, restart: bool, final: int | None = None
) -> int:
    """Run ``work()`` here, or ``work(parent=pid)`` in ``count`` processes until all have ended.

    With ``restart`` a new process replaces each that dies, unless its exit code is ``final``.
    Returns the exit code; for several processes 0, ``final``, or 1 if one died and was not
    replaced.
    """
    if count == 1:
        return work()
    connections.close_all()  # a forked child must not share a connection
    context, parent = multiprocessing.get_context("fork"), os.getpid()
    stopping = StopFlag()
    # Listen before the first fork: an early signal must not leave orphans behind.
    stop_on_signals(stopping.set)

    def start() -> bool:
        child = context.Process(target=lambda: sys.exit(work(parent=parent)))
        try:
            child.start()
        except OSError as error:  # no memory, or too many processes: the other workers go on
            logger.error("Process cannot be started error=%s", error)
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
                if stopping.is_set():  # repeatedly: a new child may not listen yet
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
    """Set timeouts for connecting, and for answers if the driver can. Its default is no timeout.

    Django's pool is switched off. A loop keeps one or two connections for life: a pool might be too
    small for them, and forked workers would share the connections that are open in it.
    """
    timeout = max(1, int(outbox_settings().LEASE_SECONDS))
    answer = int(answer_seconds or timeout)
    bounds = {
        "postgresql": {"connect_timeout": timeout},
        "mysql": {"connect_timeout": timeout, "read_timeout": answer, "write_timeout": timeout},
    }
    connection = connections[using]
    options = connection.settings_dict["OPTIONS"]
    if options.get("pool") and connection.autocommit:
        connection.close()  # to the pool, unless a transaction is open
    if _is_called.get():
        options = {**options}
        connection.settings_dict = {**connection.settings_dict, "OPTIONS": options}
    options.pop("pool", None)
    for name, seconds in bounds.get(connection.vendor, {}).items():
        options.setdefault(name, seconds)


@contextmanager
def timeouts_of_a_call() -> Iterator[None]:
    """Let ``set_timeouts()`` concern this thread alone, until the end of the block.

    Other code, before and beside the command, has timeouts of its own, and perhaps Django's pool.
    A connection that is open is kept, with its locks; one of the pool only with a transaction.
    """
    initialized = connections.all(initialized_only=True)
    before = {each.alias: (each.settings_dict, each.connection) for each in initialized}
    token = _is_called.set(True)
    try:
        yield
    finally:
        _is_called.reset(token)
        for each in connections.all(initialized_only=True):
            settings, opened = before.get(each.alias, (connections.settings[each.alias], None))
            if each.settings_dict is not settings:
                if each.connection is not opened:
                    each.close()
                each.settings_dict = settings
