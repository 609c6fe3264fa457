"""Events to be published, and the checks that refuse invalid ones before any statement.

The rules are those of the strictest database, so that a log can move to any other: names have 1 to
255 characters of valid Unicode without NUL, and versions are of type ``int``, no bool or float.
JSON is strict UTF-8 without NaN, Infinity and NUL, at most 30 levels deep (MariaDB stores no more
than 32). Dates, decimals and UUIDs become text, as ``DjangoJSONEncoder`` writes them, and keys
become strings; floats become what PostgreSQL makes of them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from enum import Enum
from itertools import accumulate
from typing import Any, Final, Literal, NamedTuple
from uuid import UUID, uuid4
from zlib import crc32

from django.core.serializers.json import DjangoJSONEncoder

from ...database.encoding import unstorable
from ..conf import SLICES, event_settings
from ..exceptions import InvalidEvent
from ..models import EventLog
from .window import TOMBSTONE

#: The most characters of a name: the width of the columns.
MAX_NAME = 255
#: The deepest nesting of JSON.
MAX_DEPTH = 30

_encode = DjangoJSONEncoder(allow_nan=False, ensure_ascii=False).encode
#: Types whose values are read back from JSON unchanged.
_SCALARS = {str, int, float, bool, type(None)}
_STRINGS = re.compile(r'"(?:[^"\\]|\\.)*"')
_NUL = re.compile(r"(?<!\\)(?:\\\\)*\\u0000")


class Expected(Enum):
    ANY = "any"
    NO_STREAM = "no stream"


#: Any version of the stream.
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
    message_id: UUID | str | None = None


class CheckedEvent(NamedTuple):
    """An event that every database can store."""

    #: The row, which has no version yet.
    row: EventLog
    #: The row's data and metadata, as JSON.
    data: str
    metadata: str
    #: Whether the caller gave the message id.
    repeatable: bool


def checked(event: NewEvent, log: type[EventLog]) -> CheckedEvent:
    """Check an event and make its row. Raises ``InvalidEvent``."""
    if not isinstance(event, NewEvent):
        raise InvalidEvent(f"publish_many() takes NewEvent(stream, type, data); got {event!r}.")
    topic = checked_name("topic", event.topic, empty=True)
    stream, type = checked_name("stream", event.stream), checked_name("type", event.type)
    data, data_text = canonical("data", event.data)
    metadata, metadata_text = canonical("metadata", event.metadata)
    repeatable = event.message_id is not None
    message_id = checked_uuid("message_id", event.message_id) if repeatable else uuid4()
    names = {"topic": topic, "stream": stream, "type": type, "slice": slice_of(stream)}
    row = log(**names, data=data, metadata=metadata, message_id=message_id)
    return CheckedEvent(row, data_text, metadata_text, repeatable)


def require_storable(events: Iterable[CheckedEvent], *, using: str) -> None:
    """Raise ``InvalidEvent`` for a character that the encoding of the database lacks."""
    for row, data, metadata, _ in events:
        texts = {"stream": row.stream, "type": row.type, "topic": row.topic}
        for name, text in {**texts, "data": data, "metadata": metadata}.items():
            if why := unstorable(text, using=using):
                raise InvalidEvent(f"{name} {why}")


def slice_of(stream: str) -> int:
    """Return the slice of a stream: its CRC-32 (as in zlib) modulo 1024."""
    return crc32(stream.encode()) % SLICES


def checked_name(field: str, value: Any, *, empty: bool = False) -> str:
    """Return a name that every database can store. Raises ``InvalidEvent``."""
    if not isinstance(value, str):
        raise InvalidEvent(f"{field} must be a string; got {value!r}. Convert it to str.")
    if not value and not empty:
        raise InvalidEvent(f"{field} must not be empty.")
    if value == TOMBSTONE:
        raise InvalidEvent(f"{field} must not be {TOMBSTONE!r}: rows that seal positions have it.")
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


def checked_uuid(field: str, value: Any) -> UUID:
    """Return a value as a UUID. Raises ``InvalidEvent`` if it is none."""
    try:
        return value if isinstance(value, UUID) else UUID(value)
    except (ValueError, AttributeError, TypeError) as error:
        raise InvalidEvent(f"{field} must be a UUID; got {value!r}.") from error


def canonical(field: str, value: Any) -> tuple[Any, str]:
    """Return a value as readers will see it, and its JSON. Raises ``InvalidEvent``."""
    limit = event_settings().MAX_EVENT_BYTES
    try:
        text = _encode(value)
        # Not if it is too large: floats that become long integers would take much memory first.
        if len(text) <= limit and ("e+" in text or "-0.0" in text):
            value = json.loads(text, parse_float=_as_numeric)
            text = _encode(value)
        size = len(text.encode())
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidEvent(
            f"{field} cannot be stored as JSON: {error}. Use strings, numbers, booleans, None, "
            "lists and dictionaries."
        ) from error
    if size > limit:
        raise InvalidEvent(
            f"{field} is {size} bytes of JSON; at most {limit} are possible "
            "(OUTBOX['MAX_EVENT_BYTES']). Store the bulk elsewhere and publish its key."
        )
    if "\\u0000" in text and _NUL.search(text):
        raise InvalidEvent(f"{field} holds a NUL character (\\u0000). Remove it.")
    if text.count("[") + text.count("{") > MAX_DEPTH and _depth(text) > MAX_DEPTH:
        raise InvalidEvent(
            f"{field} is nested {_depth(text)} levels deep; at most {MAX_DEPTH} are possible."
        )
    if type(value) in _SCALARS:
        return value, text
    seen = json.loads(text)
    # Keys that became the same string, as 1 and "1" do, are in the text twice: encode it again.
    return seen, text if seen == value else _encode(seen)


def _as_numeric(number: str) -> float:
    """Return a float as PostgreSQL's ``jsonb`` gives it back: 1e16 as an integer, -0.0 as 0.0."""
    return int(Decimal(number)) if "e+" in number else float(number) + 0.0


def comparable(value: Any) -> str:
    """Return a text that is the same for equal JSON, whichever database has returned it.

    1 and 1.0 are one number, which databases may write either way; True is no number.
    """
    seen = json.loads(json.dumps(value), parse_float=_number)
    return json.dumps(seen, sort_keys=True, separators=(",", ":"))


def _number(text: str) -> int | float:
    value = Decimal(text)
    return int(value) if value == value.to_integral_value() else float(text)


def _depth(text: str) -> int:
    brackets = (each for each in _STRINGS.sub("", text) if each in "[]{}")
    return max(accumulate(1 if each in "[{" else -1 for each in brackets), default=0)


def expected_of(wanted: Any, streams: set[str]) -> dict[str, int | None]:
    """Return the expected version of each stream, as ``expected_number`` does."""
    if isinstance(wanted, Mapping):
        if unknown := [stream for stream in wanted if stream not in streams]:
            raise InvalidEvent(
                f"expected_version names the stream {unknown[0]!r}, but no event has that stream."
            )
        return {stream: expected_number(value) for stream, value in wanted.items()}
    expected = expected_number(wanted)
    if expected is not None and len(streams) > 1:
        raise InvalidEvent(
            f"expected_version={wanted!r} was given for events of {len(streams)} streams. Give a "
            "mapping by stream."
        )
    return dict.fromkeys(streams, expected)


def expected_number(value: Any) -> int | None:
    """Return an expected version (0: no stream; None: any version). Raises ``InvalidEvent``."""
    if isinstance(value, Expected):
        return None if value is ANY else 0
    if type(value) is not int or not 1 <= value < 2**63:
        raise InvalidEvent(
            f"expected_version must be an integer from 1 to 2**63 - 1, NO_STREAM or ANY; got "
            f"{value!r}."
        )
    return value
