"""What readers of a log are given: one immutable record an event, cheaper than a model instance."""

from __future__ import annotations

from datetime import datetime
from typing import Any, NamedTuple
from uuid import UUID

from ..models import EventLog

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
        """Return the event in the JSON format of CloudEvents 1.0.

        The stream is the ``subject``; version, position and topic are the extension attributes
        ``streamversion``, ``position`` and ``topic``, as strings: their integers have 32 bits.

        Args:
            source: URI reference of the publishing system. Default: the log's table.
        """
        time = self.recorded_at.isoformat()
        return {
            "specversion": "1.0",
            "id": str(self.message_id),
            "source": source or self.log,
            "type": self.type,
            "subject": self.stream,
            "time": time if self.recorded_at.tzinfo else f"{time}Z",
            "datacontenttype": "application/json",
            "streamversion": str(self.version),
            "position": str(self.id),
            **({"topic": self.topic} if self.topic else {}),
            "data": self.data,
        }


def recorded(event: EventLog) -> RecordedEvent:
    """Return the record of a model instance."""
    values = [getattr(event, name) for name in COLUMNS]
    return RecordedEvent._make([*values, event._meta.db_table])
