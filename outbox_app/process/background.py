"""Calls in the background: the caller gets no answer, and a thread makes the call soon after.

A bounded queue has a few threads, which start when calls are sent and end when they are idle. Equal
calls that wait are combined into one. A forked child starts with an empty queue. At its exit the
process waits a limited time for the remaining calls. A call is lost if the queue is full, which is
logged once until there is room, or if the process is killed; its sender must allow for that. An
error that a call does not catch is logged, and costs no other call.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from multiprocessing import parent_process
from multiprocessing.util import Finalize, register_after_fork
from typing import Any

from celery.signals import worker_process_shutdown
from django.db import connections

from ..exceptions import OutboxError
from ..text import get_logger
from .backoff import Backoff

logger = get_logger("outbox_app.process")

#: Seconds after which an idle thread ends.
IDLE = 1.0
#: The function, its arguments after the items, and the items.
Call = tuple[Callable[..., None], tuple[Any, ...], Sequence[Any]]


def at_end(call: Callable[[], object]) -> None:
    """Call at the end of this process, and of its children, which may run no ``atexit``."""
    atexit.register(call)
    worker_process_shutdown.connect(lambda **_: call(), weak=False)  # Celery's prefork pool
    finalize = partial(Finalize, None, call, exitpriority=0)  # multiprocessing
    register_after_fork(at_end, lambda _: finalize())
    if parent_process():  # a child that has imported this itself, as one of a fork server
        finalize()


class Background:
    """A queue of at most ``longest`` calls, which are combined up to ``together`` items."""

    def __init__(
        self, name: str, *, threads: int, longest: int, together: int, at_exit: float
    ) -> None:
        self.name = name
        self.most_threads = threads
        self.longest = longest
        self.together = together
        self._room = Backoff(name, logger)
        self._begin()
        os.register_at_fork(after_in_child=self._begin)
        at_end(partial(self.drain, at_exit))

    def _begin(self) -> None:
        self.waiting: queue.Queue[Call] = queue.Queue(self.longest)
        self.threads: set[threading.Thread] = set()
        self._lock = threading.Lock()

    def send(self, call: Callable[..., None], items: Sequence[Any], *args: Any) -> None:
        """Queue ``call(items, *args)``, combined with equal calls."""
        try:
            self.waiting.put_nowait((call, args, items))
        except queue.Full:
            self._room.failed(OutboxError(f"{self.longest} calls wait, so others are lost."))
            return
        self._room.succeeded()
        try:
            with self._lock:
                if len(self.threads) < self.most_threads:
                    thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                    thread.start()
                    self.threads.add(thread)
        except RuntimeError as error:  # the process is exiting, or has too many threads
            text = "No thread can be started, so calls wait what=%s error=%s"
            logger.warning(text, self.name, error)

    def drain(self, seconds: float) -> bool:
        """Wait for all calls, for at most so many seconds; return whether all were made."""
        until = time.monotonic() + seconds
        while self.waiting.unfinished_tasks and self.threads and time.monotonic() < until:
            time.sleep(0.01)
        return not self.waiting.unfinished_tasks

    def _run(self) -> None:
        try:
            while self._make_calls():
                pass
        finally:
            with self._lock:
                self.threads.discard(threading.current_thread())
            connections.close_all()

    def _make_calls(self) -> bool:
        waiting = self.waiting  # a greenlet goes on in a forked child: it keeps the old queue
        try:
            taken = [waiting.get(timeout=IDLE)]
        except queue.Empty:
            with self._lock:  # a call that is sent after this sees one thread less
                if waiting.empty():
                    self.threads.discard(threading.current_thread())
                    return False
            return True
        count = len(taken[0][2])
        with suppress(queue.Empty):
            while count < self.together:
                taken.append(waiting.get_nowait())
                count += len(taken[-1][2])
        together: dict[tuple[Callable[..., None], tuple[Any, ...]], list[Any]] = {}
        for call, args, items in taken:
            together.setdefault((call, args), []).extend(items)
        for (call, args), all_items in together.items():
            try:
                call(all_items, *args)
            except BaseException as error:  # a SystemExit would end the thread of other senders
                text = "Background call failed what=%s error=%s"
                logger.error(text, self.name, error, exc_info=error)
        for connection in connections.all(initialized_only=True):
            # Close a connection that may be dead, or that others may wait for in Django's pool.
            if connection.errors_occurred or getattr(connection, "pool", None):
                connection.close()
        for _ in taken:
            waiting.task_done()
        return True
