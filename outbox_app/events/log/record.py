"""The records that readers of a log get: one immutable tuple for each event.

A model instance takes several times as long to make as a tuple, and could be saved, though events
do not change. Decoding costs a reader more than reading. So JSON, ids and times are decoded when a
handler first looks at them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cached_property
from typing import Any, NamedTuple
from uuid import UUID

from ...aliases import model_alias
from ..models import EventLog
from ..models.event import cloudevent
from .registry import log_named


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
    #: When the row was written (not committed), by the database's clock.
    recorded_at: datetime
    #: Table of the log.
    log: str
    #: Id of the command. Only logs of entity types set this field and the following ones.
    command_id: str | None = None
    #: Whether the command was rejected.
    rejected: bool = False
    #: The answer to the command; code and text if it was rejected.
    response: Any = None
    #: The entity's state after the command.
    state: Any = None

    def to_dict(self) -> dict[str, Any]:
        """Return the event as JSON can hold it: ids and times as text."""
        count = None if self.command_id else -len(ANSWER)
        return {
            **dict(zip(self._fields[:count], self, strict=False)),
            "message_id": str(self.message_id),
            "recorded_at": self.recorded_at.isoformat(),
        }

    def to_cloudevent(self, source: str = "") -> dict[str, Any]:
        """Return the event in the JSON format of CloudEvents."""
        using = None if self.recorded_at.tzinfo else model_alias(log_named(self.log))
        return cloudevent(self, log=self.log, source=source, using=using)


_LOG = RecordedEvent._fields.index("log")
#: The columns of every log, in the order of the record's fields.
COLUMNS = RecordedEvent._fields[:_LOG]
#: The further fields of an entity type's log, and their values for an event of another log.
ANSWER = RecordedEvent._fields[_LOG + 1 :]
NO_ANSWER = tuple(RecordedEvent._field_defaults.values())


class LazyRecord(RecordedEvent):
    """A record that holds the database's raw values. It equals the record that it decodes to."""

    # namedtuple's _replace() calls _make(). With this class, it would decode decoded values again.
    _make = RecordedEvent._make  # type: ignore[assignment]

    @cached_property
    def _decoded(self) -> RecordedEvent:
        return RecordedEvent(*(getattr(self, name) for name in self._fields))

    def __reduce__(self) -> Any:
        return RecordedEvent, tuple(self)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._decoded)


def _forwarded(name: str) -> Callable[..., Any]:
    def method(self: LazyRecord, *args: Any) -> Any:
        others = [each._decoded if isinstance(each, LazyRecord) else each for each in args]
        return getattr(self._decoded, name)(*others)

    return method


for _name in ("eq", "ne", "lt", "le", "gt", "ge", "hash", "getitem", "contains", "repr", "add"):
    setattr(LazyRecord, f"__{_name}__", _forwarded(f"__{_name}__"))
for _name in ("index", "count"):
    setattr(LazyRecord, _name, _forwarded(_name))


def lazy_record(decode: Mapping[str, Callable[[Any], Any]]) -> type[RecordedEvent]:
    """Return a class of records that decodes these columns when they are first looked at."""

    def column(name: str) -> Any:
        index, convert = RecordedEvent._fields.index(name), decode[name]
        return cached_property(lambda self: convert(tuple.__getitem__(self, index)))

    columns = {name: column(name) for name in decode}
    return type("RecordedEvent", (LazyRecord,), columns)


def recorded(event: EventLog) -> RecordedEvent:
    """Return the record of a model instance."""
    values = [getattr(event, name) for name in columns_of(type(event))]
    return record_of(values, event._meta.db_table)


def columns_of(log: type[EventLog]) -> tuple[str, ...]:
    """Return the columns of a log that its records are made of."""
    return COLUMNS + ANSWER if log.has_answers else COLUMNS


def record_of(values: Sequence[Any], log: str) -> RecordedEvent:
    """Return a record with these values, which are those of ``columns_of(log)``."""
    fields = [*values[:_LOG], log, *values[_LOG:]]
    return RecordedEvent(*fields)
