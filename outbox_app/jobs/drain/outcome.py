"""Rows on their way to a broker: made ready for kombu, and what became of each.

All that can be wrong with a row by itself is found here, before anything is sent. Expiry goes by
the database's clock: a wrong clock of the host shortens nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from celery import Celery
from celery.signals import after_task_publish
from kombu import serialization
from kombu.compression import decompress

from ..message import Declaration, Message, moment
from ..publish_signals import heard_by
from .batch import Row

_TYPES: list[tuple[str, type]] = [
    *((name, str) for name in ("exchange", "routing_key", "content_type", "content_encoding")),
    *((name, dict) for name in ("headers", "properties")),
    ("declare", list),
]
#: kombu decodes them to plain data.
_SAFE = ["application/json", "application/x-yaml", "application/x-msgpack"]


@dataclass(slots=True)
class PublishResult:
    """What became of the rows of one call. A row in none of the lists was not sent."""

    accepted: list[Row] = field(default_factory=list)
    refused: list[tuple[Row, Exception]] = field(default_factory=list)
    #: The broker may have taken these; some of them may have been sent again, and be accepted.
    unknown: list[Row] = field(default_factory=list)
    #: Why not all rows were sent; None when they were.
    error: Exception | None = None
    #: What was to be published, and when, in nanoseconds since 1970: see ``tracing``.
    prepared: list[PreparedMessage] = field(default_factory=list)
    began: int = 0
    ended: int = 0
    #: By ordering key, the id of the first row that was refused.
    _dead_keys: dict[str, int] = field(default_factory=dict)

    def refuse(self, row: Row, error: Exception) -> None:
        self.refused.append((row, error))
        if row.ordering_key:
            self._dead_keys.setdefault(row.ordering_key, row.id)

    def comes_after_a_dead_one(self, row: Row) -> bool:
        """Say whether an earlier row of the same ordering key was refused."""
        return self._dead_keys.get(row.ordering_key, row.id) < row.id


@dataclass(slots=True)
class PreparedMessage:
    """A row, decoded and ready for ``Producer.publish``."""

    row: Row
    message: Message
    options: dict[str, Any]
    #: What is to be declared before, by a name of its own.
    declare: dict[str, Declaration]

    @property
    def size(self) -> int:
        return len(self.row.body) + len(self.row.envelope)


def prepare(
    rows: Iterable[Row], app: Celery, *, now: datetime, outcome: PublishResult
) -> list[PreparedMessage]:
    """Make rows ready; those that are damaged go into ``outcome``."""
    prepared = []
    for row in rows:
        try:
            message = Message.loads(row.envelope)
            _check_types(message)
            options = _options(message)
            declare = {repr(declaration): declaration for declaration in message.declare}
            expires = moment(message.expires, app)
            if expires is not None:
                # One that is over goes without: the broker would drop it, and a worker has to say
                # that it is revoked.
                left = (expires - now).total_seconds()
                options |= {"expiration": left} if left > 0 else {}
        except Exception as error:  # a damaged row may fail in any way
            outcome.refuse(row, error)
        else:
            prepared.append(PreparedMessage(row, message, options, declare))
    return prepared


def announce(prepared: Sequence[PreparedMessage], accepted: Iterable[Row]) -> None:
    """Fire what plain Celery fires after a publish, for those that were accepted."""
    if not after_task_publish.receivers:
        return
    taken = {row.id for row in accepted}
    for item in prepared:
        task = item.row.task
        with heard_by(paired=False, task=task):
            if item.row.id in taken and after_task_publish.has_listeners(task):
                names = ("headers", "exchange", "routing_key")
                sent = {name: getattr(item.message, name) for name in names}
                after_task_publish.send(sender=task, body=_decoded(item), **sent)


def _check_types(message: Message) -> None:
    """Refuse what a broker may take all the same, and a worker cannot read."""
    for name, kind in _TYPES:
        if not isinstance(value := getattr(message, name), kind):
            raise TypeError(
                f"The envelope's {name} must be {kind.__name__}; it is {type(value).__name__}."
            )


def _options(message: Message) -> dict[str, Any]:
    names = ("exchange", "routing_key", "headers", "priority", "content_type", "content_encoding")
    return {**message.properties, **{name: getattr(message, name) for name in names}}


def _decoded(item: PreparedMessage) -> Any:
    """Return the body as Celery gives it to receivers; as bytes where decoding may run code."""
    message = item.message
    try:
        compression = message.headers.get("compression")
        body = serialization.loads(
            decompress(item.row.body, compression) if compression else item.row.body,
            message.content_type,
            message.content_encoding,
            accept=_SAFE,
        )
        if isinstance(body, dict):  # task protocol 1
            return {**body, "args": tuple(body["args"])}
        args, *rest = body
        return (tuple(args), *rest)
    except Exception:  # another serializer, or edited by hand; the broker took it as it is
        return item.row.body
