"""Removes old events of the logs of SINK beside other loops, once their archive has them.

A sink looks once a minute, and takes one batch at a time. It leaves what the archive lacks, or has
otherwise, and what a subscription still needs. ``sink_status`` says how far the logs have sunk, how
late, and why: two statements per log read its first row, and the processes that sink it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ..aliases import model_alias
from ..database.clock import DatabaseNow
from ..exceptions import OutboxError
from ..models import Process
from ..process.lease import alive
from ..retention.rows import BATCH_SIZE
from ..retention.run import Retention, logger
from ..text import error_text, without_passwords
from .archives import open_archive
from .log.registry import sinks
from .models import EventLog
from .retention import prune_steps

DAY = 86400.0
NOT_RUN = "a process of run_subscriptions or run_outbox; none is running"


class Sink(Retention):
    """Removes old events from a log of SINK, once archived and passed by all subscriptions.

    A step removes one batch, so the lease is renewed in time however many events there are.
    """

    rest = 60.0

    def __init__(self, log: type[EventLog], **options: Any) -> None:
        self.log = log
        self.resource = f"sink:{log._meta.db_table}"
        super().__init__(using=model_alias(log), **options)
        #: Columns of the archive that were not compared in the last run.
        self._left_out: Sequence[str] = ()

    def _prune(self) -> Iterator[None]:
        table, before = self.log._meta.db_table, self.done
        archive, days = sinks()[self.log]
        known, self._faults = self._faults, {}
        self._held = ""  # prune_steps says nothing about an empty log
        try:
            archived = open_archive(archive, self.log, using=self.using)
            if archived.left_out and archived.left_out != self._left_out:
                logger.warning(
                    "Columns are not compared with the archive log=%s columns=%s",
                    table, "; ".join(archived.left_out),
                )  # fmt: skip
            self._left_out = archived.left_out
            for rows, _, held in prune_steps(
                self.log, days, BATCH_SIZE, archived, using=self.using
            ):
                self.done += rows
                self._held = held and f"held by {held}"
                yield
        except OutboxError as error:
            self._faults[table] = error_text(error)
            if self._faults != known:  # once: the archive may begin an hour later
                logger.error(
                    "Old events were not removed log=%s error=%s", table, self._faults[table]
                )
        if removed := self.done - before:
            logger.info(
                "Archived events removed log=%s rows=%d archive=%s", table, removed, archive
            )


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
