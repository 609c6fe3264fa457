"""What readers of a log get: one immutable record for each event.

Making a model instance costs several times as much as making a tuple, and could be saved, though
events do not change. The order of ``COLUMNS`` is the order of the record's fields.
"""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from ..models import EventLog
from ..models.cloudevent import cloudevent

#: The columns of a record, in its order.
COLUMNS = (
    "id",
    "topic",
    "stream",
    "version",
    "type",
    "data",
    "metadata",
    "message_id",
    "recorded_at",
)


class RecordedEvent(NamedTuple):
    """A committed event."""

    #: Position in its log.
    id: int
    topic: str
    stream: str
    #: 1, 2, 3 … inside the stream.
    version: int
    type: str
    data: Any
    metadata: Any
    message_id: UUID
    #: By the database's clock, when the row was written (not when it was committed).
    recorded_at: datetime
    #: Table of the log.
    log: str

    def to_dict(self) -> dict[str, Any]:
        """Return the event as JSON can hold it: ids and times as text."""
        return {
            **self._asdict(),
            "message_id": str(self.message_id),
            "recorded_at": self.recorded_at.isoformat(),
        }

    def to_cloudevent(self, source: str = "") -> dict[str, Any]:
        """Return the event in the JSON format of CloudEvents. See ``models.cloudevent``."""
        return cloudevent(self, log=self.log, source=source)


def recorded(event: EventLog) -> RecordedEvent:
    """Return the record of a model instance."""
    values = [getattr(event, name) for name in COLUMNS]
    return RecordedEvent._make([*values, event._meta.db_table])
