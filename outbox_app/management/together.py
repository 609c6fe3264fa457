"""Everything that a small site runs, in one process: ``manage.py run_outbox`` calls this module.

Each part is the loop of one command, in a thread with its own connections and leases. So any number
of processes may run, even beside the single commands. A part that fails is logged and started again
after longer and longer pauses; the other parts continue. SIGTERM and SIGINT stop all parts: each
finishes its current work and hands its leases back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from django.db import connections

from ..aliases import outbox_alias
from ..eventlog.registry import sinks
from ..exceptions import OutboxError
from ..jobs.drain.run import drain_here
from ..prepared.run import ask_here
from ..process.foreground import EXIT_DIED, Listen, prepare, stop_on_signals
from ..process.waiting import StopFlag
from ..retention.run import Retention, Sink, retain_here
from ..subscriptions.run import run_here
from ..subscriptions.runner import ANSWER_SECONDS
from ..subscriptions.subscriber import Subscriber, all_subscribers
from ..text import get_logger

logger = get_logger("outbox_app.process")

#: Longest pause before a part is started again, in seconds. After a longer run pauses start anew.
LONGEST_PAUSE = 60.0
#: Seconds to wait for retention and sinks to stop. A later run repeats an uncommitted batch.
RETENTION_SECONDS = 2.0

#: A function that runs a loop, given ``once`` and ``listen``, and returns an exit code.
Work = Callable[..., int]


class Part(threading.Thread):
    """One loop in a thread of its own: the thread restarts the loop until the part is stopped."""

    def __init__(self, part: str, work: Work) -> None:
        # A daemon thread, so that a hanging part does not keep the process from ending.
        super().__init__(name=f"outbox-{part}", daemon=True)
        self.part = part
        self.work = work
        #: Exit code of the last attempt.
        self.code = 0
        self._stopped = StopFlag()
        self._stop_loop: Callable[[], None] = lambda: None

    def stop(self) -> None:
        self._stopped.set()
        self._stop_loop()

    def run(self) -> None:
        failures = 0
        while not self._stopped.is_set():
            began = time.monotonic()
            self.attempt(once=False)
            connections.close_all()  # those of this thread
            if self._stopped.is_set():
                return
            failures = 1 if time.monotonic() - began > LONGEST_PAUSE else failures + 1
            pause = min(LONGEST_PAUSE, 2.0 ** min(failures, 16))
            logger.error("Part has ended part=%s next_attempt_in=%.0fs", self.part, pause)
            self._stopped.wait(pause)

    def attempt(self, *, once: bool) -> None:
        """Run the loop once, in the calling thread, unless the part has been stopped."""
        if self._stopped.is_set():
            return
        try:
            self.code = self.work(once=once, listen=self._listen)
        except BaseException as error:  # a SystemExit would end the thread silently
            trace = None if isinstance(error, OutboxError) else error
            logger.error("Part failed part=%s error=%r", self.part, error, exc_info=trace)
            self.code = EXIT_DIED

    def _listen(self, stop: Callable[[], None]) -> None:
        self._stop_loop = stop
        if self._stopped.is_set():
            stop()


def run_together(*, using: str | None = None, once: bool = False) -> int:
    """Run all parts until SIGTERM or SIGINT, or one after the other with ``once``.

    Returns:
        The greatest exit code of the parts' last attempts: 0; 1 if one failed; 3 if the broker is
        unsafe.
    """
    works = _works(using or outbox_alias(), only=using)
    parts = [Part(name, work) for name, work in works.items()]

    def stop() -> None:
        for part in parts:
            part.stop()

    stop_on_signals(stop)
    if once:
        for part in parts:
            part.attempt(once=True)
    else:
        _start(parts)
        _join(parts)
    return max(part.code for part in parts)


def _works(using: str, *, only: str | None) -> dict[str, Work]:
    """Return the parts in the order in which rows pass through them: a handler may stage a job."""
    prepare(using, answer_seconds=ANSWER_SECONDS)  # the drain's watchdog has a limit of its own
    works: dict[str, Work] = {"prepared": partial(ask_here, using)}
    by_alias: dict[str, list[Subscriber]] = {}
    for each in all_subscribers():
        if each.fault:
            logger.warning("Subscription left out reason=%s", each.fault)
        elif only in (None, each.using):
            by_alias.setdefault(each.using, []).append(each)
    for alias, chosen in by_alias.items():
        works[f"subscriptions {alias}"] = partial(_handle, chosen)
    works["jobs"] = partial(drain_here, using)
    works["retention"] = partial(retain_here, partial(Retention, using=using))
    return works | _sinks(only)


def _sinks(using: str | None) -> dict[str, Work]:
    return {f"sink {log._meta.db_table}": partial(retain_here, partial(Sink, log))
            for log in sinks(using)}  # fmt: skip


@contextmanager
def sinking(using: str, *, once: bool) -> Iterator[None]:
    """While the block runs, or with ``once`` after it, remove archived events of logs that sink."""
    parts = [Part(name, work) for name, work in _sinks(using).items()]
    if once:
        yield
        for part in parts:
            part.attempt(once=True)
        return
    _start(parts)
    try:
        yield
    finally:
        for part in parts:
            part.stop()
        _join(parts)


def _handle(chosen: list[Subscriber], *, once: bool, listen: Listen) -> int:
    prepare(chosen[0].using, answer_seconds=ANSWER_SECONDS)
    return run_here(chosen, once=once, listen=listen, interval=None, batch_size=None)


def _start(parts: list[Part]) -> None:
    connections.close_all()
    for part in parts:
        part.start()


def _join(parts: list[Part]) -> None:
    for part in parts:
        part.join(RETENTION_SECONDS if part.part.startswith(("retention", "sink")) else None)
