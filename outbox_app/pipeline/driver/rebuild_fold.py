"""Folds the events of a key into rows of a projection's view, in a task of Spark.

Tasks begin without Django, so nothing here imports it before ``load_fold`` has set it up, with the
settings and the modules of the project. Rows are made in memory; no database is used.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from importlib import import_module
from typing import TYPE_CHECKING, Any
from uuid import UUID
from zoneinfo import ZoneInfo

from ..exceptions import PipelineError

if TYPE_CHECKING:
    from ...events.log.record import RecordedEvent
    from ...events.projections.rows import ProjectionTable
    from ..folding import Row


def load_fold(
    projection: str, *, module: str, using: str, settings: str, path: Sequence[str]
) -> ViewFold:
    """Return a fold, in a process that may not have set Django up yet.

    ``settings`` is used if DJANGO_SETTINGS_MODULE is not set. ``module`` declares the projection.
    ``path`` is the driver's; on other machines the project has to be installed.
    """
    sys.path += [each for each in path if each not in sys.path]
    os.environ.setdefault("DJANGO_SETTINGS_MODULE", settings)
    try:
        import django

        django.setup()
        import_module(module)
        from ...events.projections.projection import Projection
        from ...events.projections.rows import ProjectionTable
        from ...events.subscriptions.subscriber import subscriber_named

        found: Any = subscriber_named(projection).handle
        assert isinstance(found, Projection)
        return ViewFold(ProjectionTable(found, using=using))
    except Exception as error:
        raise PipelineError(
            f"A task of Spark cannot load projection {projection!r} of {module} with "
            f"the settings {settings}: {type(error).__name__}: {error}. Executors need "
            "the project as the driver has it: its modules, packages and environment."
        ) from None


class ViewFold:
    """Folds events into rows. A row is yielded as a tuple of the values of its columns."""

    def __init__(self, view: ProjectionTable) -> None:
        from django.db import connections

        from ...events.log.record import record_of
        from ...events.projections.projection import Projection
        from ...events.projections.rows import PendingEvent

        self.record, self.turn = record_of, PendingEvent
        #: Whether the projection defines key(). Else the stream is the key, and no data is parsed.
        self.own_key = type(view.projection).key is not Projection.key
        self.view = view
        [log] = view.projection.subscriber.logs
        self.log = log._meta.db_table
        self.rows: dict[Any, Any] = {}
        self.events = 0
        self.columns = columns(view.model)
        self.connection = connections[view.using]

    def key(self, row: Row) -> Any:
        """Return the key of an event. Like texts and numbers, it must hash the same everywhere."""
        event = self._event(row) if self.own_key else self.record(row, self.log)
        try:
            return self.view.key(event)
        except Exception as error:
            raise self._failed("key", event, error) from None

    def add(self, row: Row) -> None:
        """Fold the next event of a key. All events of a key come to one fold, in order."""
        event = self._event(row)
        try:
            keyed = [(self.view.key(event), self.turn(event))]
            self.rows.update(self.view.fold(self.rows, keyed))
        except Exception as error:
            raise self._failed("apply", event, error) from None
        self.events += 1

    def result(self) -> Iterator[Any]:
        """Yield the rows of the events since the last call, and then the number of these events."""
        rows, events = self.rows, self.events
        self.rows, self.events = {}, 0
        for row in rows.values():
            if row is not None:
                yield tuple(getattr(row, name) for name in self.columns)
        yield events

    def _event(self, row: Row) -> RecordedEvent:
        *names, data, metadata, message_id, recorded_at = row[:9]
        at = as_stored(recorded_at, self.connection)
        answer = list(row[9:])
        answer[2:] = [text and _json(text) for text in answer[2:]]
        values = [*names, _json(data), _json(metadata), UUID(message_id), at, *answer]
        return self.record(values, self.log)

    def _failed(self, what: str, event: RecordedEvent, error: Exception) -> PipelineError:
        # In one line: ``session.reason`` searches Spark's tracebacks for it.
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return PipelineError(
            f"Projection {self.view.projection.name!r}: {what}() of {event.stream}@{event.version} "
            f"({event.type}, position {event.id} of {event.log}) raised {type(error).__name__}: "
            f"{error!s:.500} ({frame.filename}:{frame.lineno})".replace("\n", " ")
        )


def as_stored(moment: datetime, connection: Any) -> datetime:
    """Return a time that the pipeline has read in the form in which Django reads it.

    Without ``USE_TZ`` that is naive: in the connection's zone on PostgreSQL, else as it is stored.
    """
    if connection.timezone is not None:
        return moment.astimezone(connection.timezone)
    zone = ZoneInfo(connection.timezone_name) if connection.vendor == "postgresql" else UTC
    return moment.astimezone(zone).replace(tzinfo=None)


def _json(text: str) -> Any:
    return {} if text == "{}" else json.loads(text)


def columns(model: Any) -> list[str]:
    """Return the names of the attributes that a row consists of, in the order of its values."""
    return [field.attname for field in model._meta.concrete_fields if not field.generated]
