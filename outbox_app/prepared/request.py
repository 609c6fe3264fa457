"""A sender's request to record an event, checked before anything is sent or written.

Everything that could make publishing fail later is checked here: names, JSON, size, log, task and
arguments. So a confirm cannot fail on the content of an event.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from hashlib import sha256
from typing import Any
from uuid import UUID

from django.core.serializers.json import DjangoJSONEncoder

from ..aliases import model_alias
from ..database.encoding import unstorable
from ..events.log.newevent import NewEvent, canonical, checked_name, checked_uuid, comparable
from ..events.log.newevent import checked as checked_event
from ..events.log.publish import require_log
from ..events.log.registry import log_named
from ..events.models import Event, EventLog
from ..exceptions import OutboxError
from ..jobs.staging.sending import task_named
from ..process.tracing import TRACE, current_trace, trace_in
from .conf import prepared_settings
from .exceptions import InvalidPrepared
from .models import PreparedEvent

#: The seconds after which the policy of an event decides (never later than the setting
#: PREPARED_MAX_DECIDE_BY), and for which the keeper does not ask about it, if its sender says
#: nothing else.
DECIDE_BY, IMMUNE = 86_400.0, 10.0
#: A keeper lists the open events of a sender after skipping at most so many.
MOST_SKIPPED = 1_000_000
#: A log, or its table.
Log = type[EventLog] | str


@dataclass(slots=True)
class NewPrepared:
    """An event, or a job, to be prepared. The fields are those of ``prepared()``."""

    stream: str = ""
    type: str = ""
    data: Any = None
    topic: str = ""
    metadata: Mapping[str, Any] | None = None
    log: Log = Event
    event_id: UUID | str | None = None
    policy: str = "ask"
    decide_by: float | None = None
    immune: float | None = None
    job: str = ""
    args: Sequence[Any] = ()
    kwargs: Mapping[str, Any] | None = None


def content_hash(row: PreparedEvent) -> str:
    """Return a hash of everything that is published. A round trip to a database keeps it.

    The hash leaves out the trace, because a repeated call may be in another trace.
    """
    content = {name: value for name, value in row.content.items() if name != "headers"}
    if metadata := content.get("metadata"):
        content["metadata"] = {k: v for k, v in metadata.items() if k not in TRACE}
    published = row.log, row.stream, row.type, row.topic, content
    return sha256(comparable(published).encode()).hexdigest()


def checked(new: NewPrepared, *, using: str = "") -> PreparedEvent:
    """Return the row for a keeper, with its times as offsets. Raises ``InvalidPrepared``.

    Args:
        using: The alias of the keeper and the log. Default: another service, which checks names.
    """
    if not isinstance(new, NewPrepared):
        raise InvalidPrepared(f"Give NewPrepared(stream, type, data); got {new!r:.100}.")
    try:
        fields = (_job if new.job else _event)(new, remote=not using)
        fields["event_id"] = _event_id(new.event_id)
        if using and not new.job and model_alias(log_named(fields["log"])) != using:
            raise InvalidPrepared(f"The log {fields['log']} is not on the keeper's {using!r}.")
        if using:
            _require_storable(fields, using)
    except OutboxError as error:
        raise InvalidPrepared(str(error)) from error
    if new.policy not in PreparedEvent.Policy.values:
        known = ", ".join(map(repr, PreparedEvent.Policy.values))
        raise InvalidPrepared(f"policy must be one of {known}; got {new.policy!r:.100}.")
    longest = prepared_settings().PREPARED_MAX_DECIDE_BY
    decide_by = _seconds("decide_by", new.decide_by, min(DECIDE_BY, longest), 0.001, longest)
    immune = _seconds("immune", new.immune, min(IMMUNE, decide_by), 0, decide_by)
    fields |= {"policy": new.policy, "decide_by": timedelta(seconds=decide_by)}
    row = PreparedEvent(**fields, next_check_at=timedelta(seconds=immune))  # type: ignore[misc]
    row.content_hash = content_hash(row)
    return row


def _require_storable(fields: Mapping[str, Any], using: str) -> None:
    content = json.dumps(fields["content"], ensure_ascii=False, cls=DjangoJSONEncoder)
    names = {name: value for name, value in fields.items() if isinstance(value, str)}
    for name, text in {**names, "content": content}.items():
        if why := unstorable(text, using=using):
            raise InvalidPrepared(f"{name} {why}")


def _event(new: NewPrepared, *, remote: bool) -> dict[str, Any]:
    if new.args or new.kwargs:
        raise InvalidPrepared("args and kwargs belong to a job: name its task as job=.")
    log: Any = new.log
    if isinstance(log, str):
        log = Event if remote else log_named(log)  # a log of another service is not here
    require_log(log)
    data = {} if new.data is None else new.data
    metadata = new.metadata or {}
    if not isinstance(metadata, Mapping):
        raise InvalidPrepared(f"metadata must be a mapping; got {metadata!r:.100}.")
    event = NewEvent(new.stream, new.type, data, {**metadata, **_trace(new)}, new.topic)
    row = checked_event(event, log).row
    is_elsewhere = remote and isinstance(new.log, str)
    table = checked_name("log", new.log) if is_elsewhere else log._meta.db_table
    content = {"data": row.data, "metadata": row.metadata}
    names = {"stream": row.stream, "type": row.type, "topic": row.topic}
    return {"log": table, "content": content} | names


def _job(new: NewPrepared, *, remote: bool) -> dict[str, Any]:
    fields = {"stream": new.stream, "type": new.type, "topic": new.topic, "data": new.data}
    if extra := [name for name, value in fields.items() if value]:
        raise InvalidPrepared(f"A job takes no {', '.join(extra)}. Give either job= or an event.")
    task = checked_name("job", new.job)
    if not isinstance(new.args, list | tuple) or not isinstance(new.kwargs or {}, Mapping):
        raise InvalidPrepared("args must be a list or tuple, and kwargs a mapping.")
    args, _ = canonical("args", list(new.args))
    kwargs, _ = canonical("kwargs", dict(new.kwargs or {}))
    if not remote:
        _check_task(task, args, kwargs)
    content = {"args": args, "kwargs": kwargs}
    trace = _trace(new)
    return {"type": task, "content": content | ({"headers": trace} if trace else {})}


def _trace(new: NewPrepared) -> dict[str, str]:
    """Return the trace in the event's metadata, or the caller's."""
    return trace_in(new.metadata) or current_trace()


def _check_task(name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Refuse a task that the app does not know, and arguments that do not fit its signature."""
    task = task_named(name)
    if isinstance(task, str):
        raise InvalidPrepared(f"The Celery app has no task {name!r}. Name a registered task.")
    if task.typing:
        try:
            task.__header__(*args, **kwargs)  # type: ignore[attr-defined]
        except TypeError as error:
            raise InvalidPrepared(
                f"The arguments do not fit the task {name!r}: {error}."
            ) from error


def _seconds(name: str, value: float | None, default: float, least: float, most: float) -> float:
    value = default if value is None else value
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not least <= value <= most:
        raise InvalidPrepared(
            f"{name} must be a number of {least:.8g} to {most:.8g} seconds; got {value!r:.100}."
        )
    return float(value)


def _event_id(value: UUID | str | None) -> UUID:
    if value is None:
        return time_ordered_id()
    id = checked_uuid("event_id", value)
    if not id.int:
        raise InvalidPrepared("event_id must not be the UUID of zeros: fences use it themselves.")
    return id


def time_ordered_id() -> UUID:
    """Return a UUID of version 7 (RFC 9562): milliseconds, then 74 random bits."""
    milliseconds = time.time_ns() // 1_000_000
    value = (milliseconds << 80) | secrets.randbits(80)
    value = value & ~(0xF << 76) | 0x7 << 76
    return UUID(int=value & ~(0x3 << 62) | 0x2 << 62)
