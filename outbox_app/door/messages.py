"""The content of the door's messages: strict JSON, and CloudEvents 1.0.

A message that could be read in two ways is refused: it must be UTF-8, without duplicate keys, NaN
or unknown fields. A refusal gives its reason in a fixed sentence, and never quotes the message.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from contextlib import suppress
from datetime import datetime
from typing import Any, NoReturn
from uuid import UUID

from ..aliases import outbox_alias
from ..database.clock import aware
from ..exceptions import OutboxError
from ..process.tracing import TRACE
from ..text import storable

JSON, PROBLEM = "application/json", "application/problem+json"
EVENT, EVENTS = "application/cloudevents+json", "application/cloudevents-batch+json"

#: Attributes of an event: those that are fields of ``NewPrepared``, with the names of the fields;
#: all attributes that are read; and the attributes that are allowed and ignored.
NAMES = {name: name for name in ("type", "data", "log", "topic", "policy", "immune")}
NAMES |= {"subject": "stream", "decideby": "decide_by"}
MEANT = {"specversion", "id", "source", "job", "metadata", *NAMES, *TRACE}
IGNORED = {"time", "datacontenttype", "dataschema"}


class MessageRefused(OutboxError):
    """A message, or an element of it, is invalid. ``status`` is the HTTP status of the answer."""

    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


def media_type(value: str) -> str:
    """Return the media type of a ``Content-Type``; refuse any charset but UTF-8."""
    name, *parameters = value.lower().split(";")
    if any(p.strip().replace('"', "") not in ("charset=utf-8", "") for p in parameters):
        raise MessageRefused(415, "The charset must be UTF-8.")
    return name.strip()


def parsed(body: bytes) -> Any:
    try:
        return json.loads(
            body.decode("utf-8"), object_pairs_hook=_object, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        raise MessageRefused(400, "The body is not JSON in UTF-8.") from error


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise MessageRefused(400, "An object in the body has a duplicate key.")
    return found


def _no_constant(name: str) -> NoReturn:
    raise ValueError(name)


def written(value: Any) -> bytes:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()


def objects(value: Any, most: int) -> list[dict[str, Any]]:
    """Return a list that has 1 to ``most`` elements; refuse anything else."""
    if not isinstance(value, list) or not value:
        raise MessageRefused(400, "The body must be a list with at least one element.")
    if len(value) > most:
        raise MessageRefused(413, f"A list may have at most {most} elements.")
    return value


def fields(value: Any, required: Iterable[str], optional: Iterable[str] = ()) -> dict[str, Any]:
    """Return an object that has all required and no unknown fields; refuse anything else."""
    if not isinstance(value, dict) or not set(required) <= value.keys():
        raise MessageRefused(422, "The element must be an object with all required fields.")
    if not value.keys() <= {*required, *optional}:
        raise MessageRefused(422, "The element has an unknown field.")
    return value


def event_id(value: Any) -> UUID:
    """Return the id of an event. Only one spelling of a UUID is accepted."""
    with suppress(ValueError, TypeError, AttributeError):
        id = UUID(value)
        if str(id) == value and id.int:
            return id
    raise MessageRefused(422, "The id must be a UUID in lower case with hyphens, not all zeros.")


def zoned(at: datetime) -> str:
    """Return a time of the keeper's table in ISO 8601, with its zone even if USE_TZ is off."""
    return aware(at, using=outbox_alias()).isoformat()


def cloudevent(row: Any, *, source: str) -> dict[str, Any]:
    """Return an event, or a job (a row without a log), as a CloudEvent. Times are whole seconds."""
    event = {
        "specversion": "1.0",
        "id": str(row.event_id),
        "source": source,
        "type": row.type,
        "policy": row.policy,
        "decideby": math.ceil(row.decide_by.total_seconds()),
        "immune": math.ceil(row.next_check_at.total_seconds()),
    }
    if not row.log:
        data = dict(row.content)
        event |= data.pop("headers", {})
        return event | {"job": True, "data": data}
    data, metadata = row.content["data"], row.content["metadata"]
    # An extension of CloudEvents cannot be an object, so the metadata are JSON in a string.
    texts = {"topic": row.topic, "metadata": metadata and written(metadata).decode()}
    event |= {name: value for name, value in texts.items() if value}
    return event | {"log": row.log, "subject": row.stream, "data": data}


def prepared_fields(event: Any) -> dict[str, Any]:
    """Return the attributes of a CloudEvent as fields of ``NewPrepared``."""
    event = fields(event, ("specversion", "id", "source", "type"), MEANT | IGNORED)
    texts = {"specversion", "source", "type", "subject", "log", "topic", "metadata", "policy"}
    texts |= {*TRACE}
    for text in (event[name] for name in texts if name in event):
        if not isinstance(text, str) or not text or text != storable(text):
            raise MessageRefused(422, "An attribute must be text of valid Unicode, and not empty.")
    if event["specversion"] != "1.0" or not isinstance(event.get("job"), bool | None):
        raise MessageRefused(422, "specversion must be 1.0, and job must be true or false.")
    if any(type(event[name]) is not int for name in ("decideby", "immune") if name in event):
        raise MessageRefused(422, "decideby and immune must be whole numbers of seconds.")
    if event.get("datacontenttype", "application/json") != "application/json":
        raise MessageRefused(422, "datacontenttype must be application/json.")
    found = {NAMES[name]: value for name, value in event.items() if name in NAMES}
    found["event_id"] = event_id(event["id"])
    trace = {name: event[name] for name in TRACE if name in event}
    if event.get("job"):
        if {"subject", "log", "topic", "metadata"} & event.keys():
            raise MessageRefused(422, "A job must not have a subject, log, topic or metadata.")
        job, data = found.pop("type"), fields(found.pop("data", {}), (), ("args", "kwargs"))
        args, kwargs = data.get("args", []), data.get("kwargs", {})
        if not isinstance(args, list) or not isinstance(kwargs, dict):
            raise MessageRefused(422, "A job's data must be args, a list, and kwargs, an object.")
        return found | {"job": job, "args": args, "kwargs": kwargs, "metadata": trace}
    metadata = parsed(event.get("metadata", "{}").encode())
    found["metadata"] = fields(metadata, (), metadata) | trace
    return found
