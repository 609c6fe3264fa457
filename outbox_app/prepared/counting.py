"""Counts what a keeper has decided, by the minute: how, by what route, after how long.

As ``entities.counting``: counting takes memory and no statement, and at most every ten seconds the
thread that has decided writes the counters, after its transaction. So the last seconds before a
pause are written with the next decision, and those before the end of a process are lost. Nothing
here raises.
"""

from __future__ import annotations

import os
import threading
from bisect import bisect_left
from collections.abc import Sequence
from datetime import datetime
from typing import Any, NamedTuple
from uuid import uuid4

from django.db import connections

from ..process import counters
from ..process.counters import Counters
from ..text import get_logger

logger = get_logger("outbox_app.counters")


class Decided(NamedTuple):
    """What is counted of an event: its state, and the seconds since it was prepared."""

    state: str
    seconds: float


class Counting(Counters):
    """The counters of one alias, and of one schema where tenants have theirs."""

    def __init__(self, using: str) -> None:
        super().__init__(using=using)
        self.source = str(uuid4())
        self.writing = threading.Lock()


_countings: dict[tuple[str, Any], Counting] = {}
os.register_at_fork(after_in_child=_countings.clear)


def count(decided: Sequence[Decided], now: datetime, route: str, *, using: str) -> None:
    """Count decisions that were committed, and write the counters if that is due.

    Args:
        decided: The events.
        now: By the database's clock.
        route: "call", "answer", "policy" or "person".
        using: The keeper's alias.
    """
    try:
        key = using, getattr(connections[using], "schema_name", None)
        counting = _countings.get(key) or _countings.setdefault(key, Counting(using))
        with counting.lock:
            minute = counting.at(now, counting.source)
            for each in decided:
                label = f"{each.state} {route}"
                minute.add(counters.DECIDED, 1, dimension=counters.ROUTE, label=label)
                label = counters.BUCKETS[bisect_left(counters.EDGES, each.seconds)]
                minute.add(counters.DECIDE_TIME, 1, dimension=counters.LE, label=label)
        # Of two writers at once the older figure could be the last.
        if counting.is_due and counting.writing.acquire(blocking=False):
            try:
                counting.write()
            finally:
                counting.writing.release()
    except Exception:  # they are committed
        logger.exception("Decisions on prepared events were not counted.")
