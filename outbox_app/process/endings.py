"""What ends a thread: a signal, a kill, or code of the project that raises SystemExit.

A thread that works for several callers has to tell them apart: code that raises such an error fails
for its own caller only, while an error from outside is meant for the thread.
"""

from __future__ import annotations

import sys
import threading
from asyncio import CancelledError
from collections.abc import Iterable

from celery.exceptions import SoftTimeLimitExceeded


def comes_from_outside(error: BaseException) -> bool:
    """Return whether an error that has ended a piece of code may not be that code's own.

    Signals reach the main thread only. Greenlets may be killed, and their time-outs raised, at any
    line; those errors are of no type that Python itself ends code with.
    """
    if isinstance(error, Exception) and not isinstance(error, SoftTimeLimitExceeded):
        return False
    greenlet = sys.modules.get("greenlet")
    if greenlet is not None and greenlet.getcurrent().parent is not None:
        own = (SystemExit, KeyboardInterrupt, GeneratorExit, CancelledError)
        return not isinstance(error, own)
    return threading.current_thread() is threading.main_thread()


def ends_process(error: BaseException) -> bool:
    """Return whether what code raises ends this process, or this greenlet."""
    return isinstance(error, KeyboardInterrupt) or type(error).__name__ == "GreenletExit"


def raise_what_ends_process(errors: Iterable[BaseException]) -> None:
    for error in filter(ends_process, errors):
        raise error
