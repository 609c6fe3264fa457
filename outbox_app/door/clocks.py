"""How far the clocks of peers are off, by the times in their signatures. Needs no extra.

The offset of a wrong clock is written to the table of statistics, where every process finds it: at
once, then each minute, and once more when the clock is right again. A peer whose clock is right
costs no statement. Only a message with a valid signature counts. A row's minute is taken from the
database's clock, because this host's own clock may be the wrong one. A failed write raises nothing.
"""

from __future__ import annotations

import time
from datetime import timedelta

import django.db
from django.db import connections
from django.db.models.functions import TruncMinute

from ..aliases import outbox_alias
from ..database.clock import DatabaseNow
from ..models import Statistic
from ..models.statistic import write_figures
from ..text import get_logger

logger = get_logger("outbox_app.door")

#: By how many seconds the clock of a peer is wrong. The label is the peer.
PEER_CLOCK, PEER = "peer_clock", "peer"

#: Seconds by which two clocks may differ, and seconds between two rows about a wrong clock.
CLOCKS, EVERY = 60, 60.0
#: How long a row counts if no later row has replaced it.
KEPT = timedelta(hours=1)

#: By peer: when this process last wrote a row about its clock, and the offset in seconds.
_noted: dict[str, tuple[float, int]] = {}


def note_clock(peer: str, seconds: float) -> None:
    """Record the clock offset of a peer whose signature has been verified."""
    now, away = time.monotonic(), round(seconds) if abs(seconds) > CLOCKS else 0
    at, before = _noted.get(peer, (now, 0))
    if abs(away - before) <= CLOCKS and (not away or now - at < EVERY):
        return
    using = outbox_alias()
    if connections[using].in_atomic_block:  # the caller's transaction may roll back
        return
    _noted[peer] = now, away
    key = {"name": PEER_CLOCK, "dimension": PEER, "label": peer, "source": "door"}
    minute = TruncMinute(DatabaseNow(), tzinfo=connections[using].timezone)
    row = Statistic(**key, minute=minute, value=away)
    try:
        write_figures([row], using=using)
    except django.db.Error as error:
        logger.warning("The clock of a peer was not noted error=%s", error)


def wrong_clocks(*, using: str) -> dict[str, int]:
    """Return the peers whose clocks are wrong, each with its offset in seconds."""
    since = DatabaseNow() - KEPT
    rows = Statistic.objects.using(using).filter(name=PEER_CLOCK, minute__gte=since)
    seen = dict(rows.order_by("minute").values_list("label", "value"))
    return {peer: int(away) for peer, away in seen.items() if away}
