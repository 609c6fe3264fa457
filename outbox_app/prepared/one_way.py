"""Calls without an answer: a confirm after the commit must not hold up a request.

A bounded queue of two threads, which are started when there is something to do, anew after a fork,
and end when there is nothing. Calls that wait are made as one. What is full, fails or is killed
loses a call: the check-back is the retry.
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
from typing import Any

from django.db import connections

from ..text import get_logger

logger = get_logger("outbox_app.prepared")

#: Threads; calls that may wait; seconds after which an idle thread ends; seconds at exit.
THREADS, LONGEST, IDLE, AT_EXIT = 2, 10_000, 1.0, 2.0
#: Items from which on a call is made without those that wait after it.
TOGETHER = 100

_lock = threading.Lock()
#: What is called with which arguments, after its items; and the items.
Call = tuple[Callable[..., None], tuple[Any, ...], Sequence[Any]]
_calls: queue.Queue[Call] = queue.Queue(LONGEST)
_threads: set[threading.Thread] = set()


def send(call: Callable[..., None], items: Sequence[Any], *args: Any) -> None:
    """Have a thread make a call, some time soon, with the items of others of it. It may be lost."""
    try:
        _calls.put_nowait((call, args, items))
    except queue.Full:
        logger.warning("Too many calls wait, so the keeper will ask queue=%d", LONGEST)
        return
    with _lock:
        if len(_threads) < THREADS:
            work = partial(_work, _calls)
            thread = threading.Thread(target=work, name="outbox-one-way", daemon=True)
            try:
                thread.start()
            except RuntimeError as error:  # the process ends, or has threads enough
                logger.warning("No thread can be started, so the keeper may ask error=%r", error)
            else:
                _threads.add(thread)


def _work(calls: queue.Queue[Call]) -> None:
    try:
        while _work_once(calls):
            pass
    finally:
        with _lock:
            _threads.discard(threading.current_thread())
        connections.close_all()


def _work_once(calls: queue.Queue[Call]) -> bool:
    try:
        taken = [calls.get(timeout=IDLE)]
    except queue.Empty:
        with _lock:  # a call that comes after this finds one thread less
            if calls.empty():
                _threads.discard(threading.current_thread())
                return False
        return True
    with suppress(queue.Empty):
        while sum(len(items) for *_, items in taken) < TOGETHER:
            taken.append(calls.get_nowait())
    together: dict[tuple[Callable[..., None], tuple[Any, ...]], list[Any]] = {}
    for call, args, items in taken:
        together.setdefault((call, args), []).extend(items)
    for (call, args), all_items in together.items():
        try:
            call(all_items, *args)
        except Exception as error:
            logger.warning("The keeper was not told, so it will ask error=%r", error)
    for _ in taken:
        calls.task_done()
    return True


def drain(seconds: float) -> bool:
    """Wait until every call was made, for so many seconds at most; say whether they were."""
    until = time.monotonic() + seconds
    while _calls.unfinished_tasks and time.monotonic() < until:
        time.sleep(0.01)
    return not _calls.unfinished_tasks


def _after_fork() -> None:
    global _lock, _calls
    _lock, _calls = threading.Lock(), queue.Queue(LONGEST)
    _threads.clear()


os.register_at_fork(after_in_child=_after_fork)
atexit.register(drain, AT_EXIT)
