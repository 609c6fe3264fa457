"""How far the logs of the setting SINK have sunk into their archives, how late, and why.

Two statements per log read its first row, and the processes that sink it.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..aliases import model_alias
from ..database.clock import DatabaseNow
from ..models import Process
from ..process.lease import alive
from ..text import without_passwords
from .log.registry import sinks

DAY = 86400.0
NOT_RUN = "a process of run_subscriptions or run_outbox; none is running"


@dataclass(frozen=True, slots=True)
class SinkStatus:
    """A log whose old events leave the database once its archive holds them."""

    log: str
    archive: str
    #: Age in days from which events sink.
    days: int
    #: Position and age of the oldest event that is still in the database; None if there is none.
    position: int | None
    oldest_seconds: float
    #: For how many seconds this event should have been gone.
    behind_seconds: float
    #: What the log waits for; empty if it sinks, or catches up.
    waits_for: str


def sink_status(*, using: str | None = None) -> list[SinkStatus]:
    """Return the facts of all logs that sink, or of those on one alias."""
    found = []
    for log, (address, days) in sinks(using).items():
        alias, table, archive = model_alias(log), log._meta.db_table, without_passwords(address)
        processes = alive(Process.objects.using(alias).filter(resource=f"sink:{table}"))
        rows = log._base_manager.using(alias).order_by("pk").annotate(now=DatabaseNow())
        oldest = rows.values_list("pk", "recorded_at", "now").first()
        age = max(0.0, (oldest[2] - oldest[1]).total_seconds()) if oldest else 0.0
        position = oldest[0] if oldest else None
        behind = max(0.0, age - days * DAY)
        troubles = {each.trouble for each in processes if each.trouble}
        waits_for = "; ".join(troubles) if processes else NOT_RUN
        found.append(SinkStatus(table, archive, days, position, age, behind, waits_for))
    return found
