"""Calls without an answer: threads make them, soon after.

A bounded queue of few threads, which are started when there is something to do, and end when there
is nothing. Calls that wait are made as one. A child begins anew: its parent's calls are its
parent's. The end of the process waits for what is left, for so long. What finds the queue full, or
is killed, is lost: who sends it knows what makes up for that. Calls catch their errors.
"""

from __future__ import annotations

import atexit
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from django.db import connections

from ..text import get_logger

logger = get_logger("outbox_app.process")

#: Seconds after which an idle thread ends.
IDLE = 1.0
#: What is called with which arguments, after its items; and the items.
Call = tuple[Callable[..., None], tuple[Any, ...], Sequence[Any]]


class Background:
    """A queue of at most ``longest`` calls, and its threads.

    From ``together`` items on a call is made without those that wait after it.
    """

    def __init__(
        self, name: str, *, threads: int, longest: int, together: int, at_exit: float
    ) -> None:
        self.name = name
        self.most_threads = threads
        self.longest = longest
        self.together = together
        self._begin()
        os.register_at_fork(after_in_child=self._begin)
        atexit.register(self.drain, at_exit)

    def _begin(self) -> None:
        self.waiting: queue.Queue[Call] = queue.Queue(self.longest)
        self.threads: set[threading.Thread] = set()
        self._lock = threading.Lock()

    def send(self, call: Callable[..., None], items: Sequence[Any], *args: Any) -> bool:
        """Have ``call(items, *args)`` made, with the items of others of it; False: it is lost."""
        try:
            self.waiting.put_nowait((call, args, items))
        except queue.Full:
            return False
        with self._lock:
            if len(self.threads) < self.most_threads:
                thread = threading.Thread(target=self._run, name=self.name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:  # the process ends, or has threads enough
                    text = "No thread can be started, so calls wait what=%s error=%r"
                    logger.warning(text, self.name, error)
                else:
                    self.threads.add(thread)
        return True

    def drain(self, seconds: float) -> bool:
        """Wait until every call was made, for so many seconds at most; say whether they were."""
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
        waiting = self.waiting  # it goes on with this one where a fork has its thread: a greenlet
        try:
            taken = [waiting.get(timeout=IDLE)]
        except queue.Empty:
            with self._lock:  # a call that comes after this finds one thread less
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
            call(all_items, *args)
        for connection in connections.all(initialized_only=True):
            # It may be dead, and is opened anew; or others wait for what Django's pool has.
            if connection.errors_occurred or getattr(connection, "pool", None):
                connection.close()
        for _ in taken:
            waiting.task_done()
        return True
