"""Locks of Celery and kombu that a forked child would meet when it stages.

Each read of a kombu ``cached_property``, such as ``app.amqp``, takes a lock of the property, even
if the value is there; so does a signal that has receivers, and the cached name of the host. A child
that was forked while another thread of its parent held such a lock would wait for that thread for
ever, inside an open transaction. So a child begins with new locks. What they guard are single
assignments, which were made or are made again.
"""

from __future__ import annotations

import os
import sys
import threading
from types import FunctionType
from typing import Any

from celery.utils.dispatch import Signal
from kombu.utils.objects import cached_property


def _renew_locks() -> None:
    """Give a forked child locks that no thread holds."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("celery", "kombu"):
            for value in list(getattr(module, "__dict__", {}).values()):
                _renew(value)


def _renew(value: Any) -> None:
    kind = type(value)  # isinstance() would evaluate a proxy of Celery's
    if issubclass(kind, Signal):
        value.lock = threading.Lock()
    elif issubclass(kind, type):
        each: Any
        for each in list(vars(value).values()):
            if issubclass(type(each), cached_property):
                each.lock = threading.RLock()
    elif kind is FunctionType and "mutex" in value.__code__.co_freevars:  # of kombu's memoize()
        cells = dict(zip(value.__code__.co_freevars, value.__closure__, strict=True))
        cells["mutex"].cell_contents = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)
