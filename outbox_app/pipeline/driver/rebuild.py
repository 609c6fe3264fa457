"""Rebuilds a view on Spark: ``manage.py outbox_pipeline rebuild NAME``.

Tasks read all events up to one offset, from the archive and the log after it, and fold them into
rows; this process loads the rows into a shadow table. So tasks only need the right to read, and a
task that is retried, or still runs somewhere after it was given up, does no harm. Then the new rows
are compared with the live ones. The takeover is that of ``projections.rebuild``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

from django.db import IntegrityError, models, transaction

from ...events.exceptions import RebuildRefused
from ...events.log.filter import EventFilter
from ...events.log.state import WindowState
from ...events.models import EventLog
from ...events.projections.comparison import compare
from ...events.projections.projection import Projection
from ...events.projections.rebuild import Rebuild, failing_as_one, rebuildable, require_whole
from ...events.projections.shadow_table import shadow_table
from ...failpoints import failpoint
from ...text import Write, get_logger
from ..exceptions import PipelineError
from ..session import reason
from .pipeline import disconnect
from .rebuild_fold import columns, load_fold

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import SparkSession

    from ..archive_reader import Planned
    from ..options import Options

logger = get_logger("outbox_app.pipeline")

#: Rows loaded by one statement.
ROWS = 1_000
#: Rows between two progress lines.
PROGRESS_ROWS = 50_000


def log_of(name: str) -> tuple[type[EventLog], str]:
    """Return the log of a projection, and its alias. Raises ``RebuildRefused``."""
    projection = rebuildable(name)
    logs = projection.subscriber.logs
    if len(logs) > 1:
        tables = ", ".join(log._meta.db_table for log in logs)
        raise RebuildRefused(
            f"Projection {name!r} reads {len(logs)} logs ({tables}), but an archive or an offset "
            f"belongs to one log. Rebuild it without Spark: manage.py outbox_rebuild {name}."
        )
    return logs[0], projection.subscriber.using


def rebuild_on_spark(
    session: SparkSession,
    options: Options,
    name: str,
    *,
    archive: str = "",
    write: Write = logger.info,
) -> int:
    """Rebuild a view from Spark's rows. Raises ``RebuildRefused``, ``RebuildFailed``."""
    _, using = log_of(name)
    projection = rebuildable(name)
    with failing_as_one(name, describe=reason):
        from ..archive_reader import planned

        options = replace(options, archive=archive)
        # Plan first: rows that are pruned later are missed when they are read, or after that.
        plan = planned(options)
        _require_whole(session, options, projection)
        with shadow_table(projection.model, using=using) as shadow:
            return SparkRebuild(session, options, plan, projection, shadow, write=write).run()


def _require_whole(session: SparkSession, options: Options, projection: Projection) -> None:
    """Raise ``RebuildRefused`` if an event was removed from the log, and from its archive."""
    from ..folding import beginning_missing

    if not options.archive:
        require_whole(projection)
    elif stream := beginning_missing(session, options):
        raise RebuildRefused(
            f"Neither {options.log} nor the archive {options.archive} has version 1 of "
            f"{stream!r}: events were removed that are not archived. The view has applied them, "
            "but a rebuild could not. Put the events back, or keep the view as it is."
        )


class SparkRebuild(Rebuild):
    def __init__(
        self,
        session: SparkSession,
        options: Options,
        plan: Planned,
        projection: Projection,
        shadow: type[models.Model],
        *,
        write: Write,
    ) -> None:
        super().__init__(projection, shadow, write=write)
        self.session, self.options, self.plan = session, options, plan

    def fill(self) -> list[WindowState]:
        """Load the rows that Spark makes of the events up to an offset; catch up from there."""
        from pyspark import StorageLevel

        self.write(f"folding name={self.name} parts={len(self.plan.parts)}")
        self.ask(self._close)
        disconnect(self.using)
        folded = self._fold().persist(StorageLevel.DISK_ONLY)  # of the executors
        try:
            folded.count()  # the iterator of ``_load`` would run the tasks one after the other
            failpoint("rebuild_folded")
            self._load(folded)
        finally:
            folded.unpersist()
        if not self.options.archive:
            self.ask(require_whole, self.projection)  # it may have been pruned meanwhile
        [reader] = self.readers
        self.positions = [self.plan.end.position]
        return self.replay([reader.load(self.plan.end.state)])

    def finish(self, states: list[WindowState]) -> int:
        self._compare()
        failpoint("rebuild_compared")
        # The comparison took some time, and the takeover locks: replay, so that little is left.
        return super().finish(self.replay(states))

    def _fold(self) -> RDD[Any]:
        """Return an RDD of rows, and of the numbers of their events. No task has run yet.

        Tasks are sent names, and no password.
        """
        from ..folding import fold

        make = partial(
            load_fold,
            self.name,
            module=type(self.projection).__module__,
            using=self.using,
            settings=os.environ["DJANGO_SETTINGS_MODULE"],
            path=tuple(map(os.path.abspath, sys.path)),
        )
        only = EventFilter(self.subscriber.topics, self.subscriber.types)
        return fold(self.session, self.options, only, self.plan.parts, make)

    def _load(self, folded: RDD[Any]) -> None:
        results = folded.toLocalIterator(prefetchPartitions=True)
        rows, loaded = self._rows(results), 0
        while batch := list(islice(rows, ROWS)):
            try:
                with transaction.atomic(using=self.using):
                    for packet in self.view.packets(batch):
                        self.view.rows.bulk_create(packet)
            except IntegrityError as error:
                raise PipelineError(
                    f"Rows of {self.live._meta.db_table} cannot be loaded: {error}. If two keys "
                    "are equal to the database, declare the primary key with "
                    "outbox_app.fields.CharField, and run manage.py makemigrations and migrate."
                ) from error
            failpoint("rebuild_loaded")
            before, loaded = loaded, loaded + len(batch)
            if before // PROGRESS_ROWS < loaded // PROGRESS_ROWS:
                self.write(f"loading name={self.name} rows={loaded}")
        self.write(f"loaded name={self.name} events={self.replayed} rows={loaded}")

    def _rows(self, results: Iterable[Any]) -> Iterator[models.Model]:
        names = columns(self.shadow)
        for each in results:
            if isinstance(each, int):
                self.replayed += each
            else:
                yield self.shadow.from_db(self.using, names, each)

    def _compare(self) -> None:
        counts, examples = compare(self.live, self.shadow, using=self.using)
        numbers = " ".join(f"{kind}={count}" for kind, count in counts.items())
        self.write(f"compared name={self.name} {numbers}")
        for line in examples:
            self.write(f"  {line}")
