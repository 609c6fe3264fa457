"""Removes old events of the logs of SINK beside other loops, once their archive has them.

A sink looks once a minute, and takes one batch at a time. It leaves what the archive lacks, and
what a subscription still needs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ..aliases import model_alias
from ..exceptions import OutboxError
from ..retention.rows import BATCH_SIZE
from ..retention.run import Retention, logger
from ..text import error_text
from .archives import open_archive
from .log.registry import sinks
from .models import EventLog
from .retention import prune_steps


class Sink(Retention):
    """Removes old events from a log of SINK, once archived and passed by all subscriptions.

    A step removes one batch, so the lease is renewed in time however many events there are.
    """

    rest = 60.0

    def __init__(self, log: type[EventLog], **options: Any) -> None:
        self.log = log
        self.resource = f"sink:{log._meta.db_table}"
        super().__init__(using=model_alias(log), **options)

    def _prune(self) -> Iterator[None]:
        table, before = self.log._meta.db_table, self.done
        archive, days = sinks()[self.log]
        known, self._faults = self._faults, {}
        self._held = ""  # prune_steps says nothing about an empty log
        try:
            archived = open_archive(archive, table)
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
