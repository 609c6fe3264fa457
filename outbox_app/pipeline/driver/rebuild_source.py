"""The rows of a projection as Spark makes them: what is planned, and what its tasks are sent.

A plan holds every event up to its offset, in the archive or in the log behind it; where one was
removed from both there is no plan. Tasks are sent names, and no password.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any
from uuid import UUID

from ...eventlog.filter import EventFilter
from ...exceptions import PipelineError, RebuildRefused
from ...models import EntityVersion, EventLog
from ...projections.projection import Projection
from ...projections.rebuild import require_whole
from .rebuild_fold import ProjectionFold

if TYPE_CHECKING:
    from pyspark import RDD
    from pyspark.sql import SparkSession

    from ..folding import Plan
    from ..offset import Offset
    from ..options import Options


class Source:
    def __init__(self, session: SparkSession, options: Options, projection: Projection) -> None:
        self.session = session
        self.options = options
        self.projection = projection

    def plan(self) -> Plan:
        """Plan for all events that are committed by now. Raises ``RebuildRefused``."""
        from ..folding import Plan, beginning_missing

        subscriber = self.projection.subscriber
        if self.options.archive and issubclass(subscriber.logs[0], EntityVersion):
            raise RebuildRefused(
                f"An archive holds no answers and no states of {self.options.log}, which its "
                "events carry. Leave --archive out; the log must have all its versions."
            )
        plan = Plan.make(self.options, EventFilter(subscriber.topics, subscriber.types))
        # After the plan: what is pruned between the two is found here, or by ``Plan.pruned``.
        if not self.options.archive:
            require_whole(subscriber.logs[0], using=subscriber.using)
        elif stream := beginning_missing(self.session, self.options):
            raise RebuildRefused(
                f"Neither {self.options.log} nor the archive {self.options.archive} has version 1 "
                f"of {stream!r}: events were removed that are not archived. The view knows them, "
                "and a rebuild would not. Put them back, or leave the view."
            )
        return plan

    def fold(self, plan: Plan) -> RDD[Any]:
        """Return the rows, and how many events they were made of. Nothing has run yet."""
        from ..folding import fold

        projection = self.projection
        make = ProjectionFold(
            projection.name,
            type(projection).__module__,
            projection.subscriber.using,
            self.options.log,
            os.environ["DJANGO_SETTINGS_MODULE"],
            tuple(map(os.path.abspath, sys.path)),
        )
        return fold(self.session, plan, make)


def require_same_database(log: type[EventLog], end: Offset, *, using: str) -> None:
    """See that Spark has read what the subscription reads. Raises ``PipelineError``."""
    rows = log._default_manager.using(using)
    found = rows.filter(pk=end.position).values_list("message_id", flat=True).first()
    expected = UUID(end.message_id) if end.position else None
    # Where it is pruned everything before it is, too.
    if found != expected and (found or rows.filter(pk__lt=end.position).exists()):
        raise PipelineError(
            f"Spark has seen event {expected} at position {end.position} of {end.log}; here there "
            f"is {found or 'none'}: it has read another database."
        )
