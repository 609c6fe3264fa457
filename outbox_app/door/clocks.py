"""By how much the clocks of peers are away, as their signatures say. Needs no extra.

A clock is noted in the table of statistics, where every process finds it: at once when it turns out
wrong, then each minute, and once more when it is right again. A peer whose clock is right costs no
statement. Only who has the key tells of its clock. Minutes go by the database's clock, as that of
this host may be the wrong one. Nothing here raises for a write that fails.
"""

from __future__ import annotations

import time
from datetime import UTC, timedelta

import django.db
from django.db import connections
from django.db.models.functions import TruncMinute

from ..aliases import outbox_alias
from ..models import DatabaseNow, Statistic
from ..models.statistic import write_figures
from ..process.counters import PEER, PEER_CLOCK
from ..text import get_logger

logger = get_logger("outbox_app.door")

#: Seconds by which two clocks may differ, and between two notes about one that is wrong.
CLOCKS, EVERY = 60, 60.0
#: How long a note counts that no later one has replaced.
KEPT = timedelta(hours=1)

#: By peer: when this process noted its clock, and by how much it was away.
_noted: dict[str, tuple[float, int]] = {}


def note_clock(peer: str, seconds: float) -> None:
    """Note the clock of a peer, whose signature has been verified."""
    now, away = time.monotonic(), round(seconds) if abs(seconds) > CLOCKS else 0
    at, before = _noted.get(peer, (now, 0))
    if abs(away - before) <= CLOCKS and (not away or now - at < EVERY):
        return
    using = outbox_alias()
    if connections[using].in_atomic_block:  # the caller's, which may roll back
        return
    _noted[peer] = now, away
    key = {"name": PEER_CLOCK, "dimension": PEER, "label": peer, "source": "door"}
    row = Statistic(**key, minute=TruncMinute(DatabaseNow(), tzinfo=UTC), value=away)
    try:
        write_figures([row], using=using)
    except django.db.Error as error:
        logger.warning("The clock of a peer was not noted error=%r", error)


def wrong_clocks(*, using: str) -> dict[str, int]:
    """Return the peers whose clocks are away, and by how many seconds."""
    since = DatabaseNow() - KEPT
    rows = Statistic.objects.using(using).filter(name=PEER_CLOCK, minute__gte=since)
    seen = dict(rows.order_by("minute").values_list("label", "value"))
    return {peer: int(away) for peer, away in seen.items() if away}
