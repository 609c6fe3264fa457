"""Events that are offered, and what is refused of them before any statement.

The rules are those of the strictest database, so that a log can move: names of 1 to 255 characters
in valid Unicode without NUL, canonical JSON, versions that are integers and nothing like it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Final, Literal
from uuid import UUID, uuid4
from zlib import crc32

from ..conf import SLICES
from ..exceptions import InvalidEvent
from ..models import EventLog
from .encoding import canonical

#: Characters of a name: the columns' width.
MAX_NAME = 255


class Expected(Enum):
    """Expectations that are not a number."""

    ANY = "any"
    NO_STREAM = "no stream"


#: Whatever version the stream is at.
ANY: Final = Expected.ANY
#: The stream must not exist yet.
NO_STREAM: Final = Expected.NO_STREAM

ExpectedVersion = int | Literal[Expected.ANY, Expected.NO_STREAM]


@dataclass(slots=True)
class NewEvent:
    """An event to be published. The fields are those of ``publish()``."""

    stream: str
    type: str
    data: Any = field(default_factory=dict)
    metadata: Any = field(default_factory=dict)
    topic: str = ""
    message_id: UUID | None = None


def checked(event: NewEvent, log: type[EventLog]) -> tuple[EventLog, NewEvent]:
    """Return the row of an event, without a version, and the event.

    Raises:
        InvalidEvent: Something of it could not be stored on every database.
    """
    if not isinstance(event, NewEvent):
        raise InvalidEvent(f"publish_many() takes NewEvent(stream, type, data); got {event!r}.")
    row = log(
        topic=_name("topic", event.topic, empty=True),
        stream=_name("stream", event.stream),
        type=_name("type", event.type),
        data=canonical("data", event.data),
        metadata=canonical("metadata", event.metadata),
        slice=slice_of(event.stream),
        message_id=uuid4() if event.message_id is None else _uuid(event.message_id),
    )
    return row, event


def slice_of(stream: str) -> int:
    """Return the slice of a stream: its CRC-32 (as in zlib) modulo 1024."""
    return crc32(stream.encode()) % SLICES


def _name(field: str, value: Any, *, empty: bool = False) -> str:
    if not isinstance(value, str):
        raise InvalidEvent(f"{field} must be a string; got {value!r}. Convert it to str.")
    if not value and not empty:
        raise InvalidEvent(f"{field} must not be empty.")
    if len(value) > MAX_NAME:
        raise InvalidEvent(
            f"{field} has {len(value)} characters; at most {MAX_NAME} are possible. It begins "
            f"with {value[:60]!r}."
        )
    if "\x00" in value:
        raise InvalidEvent(f"{field} {value[:60]!r} holds a NUL character. Remove it.")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidEvent(f"{field} {value[:60]!r} is not valid Unicode: {error}.") from error
    return value


def _uuid(value: Any) -> UUID:
    try:
        return value if isinstance(value, UUID) else UUID(value)
    except (ValueError, AttributeError, TypeError) as error:
        raise InvalidEvent(f"message_id must be a UUID; got {value!r}.") from error


def expected_of(given: Any, rows: list[tuple[EventLog, NewEvent]]) -> dict[str, ExpectedVersion]:
    """Return what is expected of each stream.

    Raises:
        InvalidEvent: It makes no sense, or it is not said of which stream.
    """
    streams = {row.stream for row, _ in rows}
    if isinstance(given, Mapping):
        if unknown := sorted(set(given) - streams):
            raise InvalidEvent(
                f"expected_version names the stream {unknown[0]!r}, of which there is no event."
            )
        return {stream: _expectation(value) for stream, value in given.items()}
    if _expectation(given) is not ANY and len(streams) > 1:
        raise InvalidEvent(
            f"expected_version={given!r} was given for events of {len(streams)} streams. Give a "
            "mapping by stream."
        )
    return dict.fromkeys(streams, given)


def _expectation(value: Any) -> ExpectedVersion:
    if isinstance(value, Expected):
        return value
    if type(value) is not int or not 1 <= value < 2**63:
        raise InvalidEvent(
            f"expected_version must be an integer from 1 to 2**63 - 1, NO_STREAM or ANY; got "
            f"{value!r}."
        )
    return value
