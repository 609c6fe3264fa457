"""Everything that a small site runs, in one process: ``manage.py run_outbox`` calls this module.

Each loop is that of one command, in a thread with its own connections and leases. So any number of
processes may run, even beside the single commands. A loop that fails is logged and started again
after longer and longer pauses; the others continue. SIGTERM and SIGINT stop all loops: each
finishes its current work and hands its leases back.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from django.db import connections

from .aliases import outbox_alias
from .capability import Loop, all_doors
from .exceptions import OutboxError
from .process.foreground import EXIT_DIED, prepare_process, stop_on_signals
from .process.waiting import StopFlag
from .text import get_logger

logger = get_logger("outbox_app.process")

#: Longest pause before a loop is started again, in seconds. After a longer run pauses start anew.
LONGEST_PAUSE = 60.0
#: Seconds to wait for a clean-up to stop. A later run repeats an uncommitted batch.
CLEANUP_SECONDS = 2.0
#: Seconds after which a statement of the main thread without an answer is cut off.
ANSWER_SECONDS = 300.0


class LoopThread(threading.Thread):
    """One loop in a thread of its own: the thread restarts the loop until it is stopped."""

    def __init__(self, title: str, loop: Loop) -> None:
        # A daemon thread, so that a hanging loop does not keep the process from ending.
        super().__init__(name=f"outbox-{title}", daemon=True)
        self.title = title
        self.loop = loop
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
            logger.error("Loop ended and will be restarted loop=%s in=%.0fs", self.title, pause)
            self._stopped.wait(pause)

    def attempt(self, *, once: bool) -> None:
        """Run the loop once, in the calling thread, unless it has been stopped."""
        if self._stopped.is_set():
            return
        try:
            self.code = self.loop.run(once=once, listen=self._listen)
        except BaseException as error:  # a SystemExit would end the thread silently
            trace = None if isinstance(error, OutboxError) else error
            logger.error("Loop failed loop=%s error=%s", self.title, error, exc_info=trace)
            self.code = EXIT_DIED

    def _listen(self, stop: Callable[[], None]) -> None:
        self._stop_loop = stop
        if self._stopped.is_set():
            stop()


def run_together(*, using: str | None = None, once: bool = False) -> int:
    """Run all loops until SIGTERM or SIGINT, or one after the other with ``once``.

    Returns:
        The greatest exit code of the loops' last attempts: 0; 1 if one failed; 3 if the broker is
        unsafe.
    """
    threads = [LoopThread(name, loop) for name, loop in _loops(using or outbox_alias(), only=using)]

    def stop() -> None:
        for thread in threads:
            thread.stop()

    stop_on_signals(stop)
    if once:
        for thread in threads:
            thread.attempt(once=True)
    else:
        start(threads)
        join(threads)
    return max(thread.code for thread in threads)


def _loops(using: str, *, only: str | None) -> list[tuple[str, Loop]]:
    """Return the loops, those first whose rows the others handle: a handler may stage a job."""
    # The drain's watchdog has a limit of its own.
    prepare_process(using, answer_seconds=ANSWER_SECONDS)
    found = [
        item for doors in reversed(all_doors()) for item in doors.loops(using, only=only).items()
    ]
    return sorted(found, key=lambda item: item[1].cleanup)


def start(threads: list[LoopThread]) -> None:
    connections.close_all()
    for thread in threads:
        thread.start()


def join(threads: list[LoopThread]) -> None:
    for thread in threads:
        thread.join(CLEANUP_SECONDS if thread.loop.cleanup else None)
