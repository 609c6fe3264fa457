"""Rows on their way to a broker: ``decode_rows`` decodes, ``PublishResult`` sorts them.

``decode_rows`` finds every error in a row itself before anything is sent. Expiry follows the
database's clock: a wrong clock of the host shortens nothing.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import datetime
from operator import attrgetter
from types import NoneType
from typing import Any

import kombu
from celery import Celery
from celery.signals import after_task_publish

from ...conf import outbox_settings
from ...signals import jobs_published
from ..message import ADDRESS, Declaration, Message, moment
from ..staging.calls import surrounded
from . import brokers
from .batch import Row
from .tracing import trace_batch

_TYPES: dict[str, type] = {
    **dict.fromkeys(("exchange", "routing_key", "content_type", "content_encoding"), str),
    **{"headers": dict, "properties": dict, "declare": list, "sent_event": dict},
}
_typed = attrgetter(*_TYPES)
_behind = attrgetter(*Message.__slots__[4:])
_OPTIONS = ("exchange", "routing_key", "headers", "priority", "content_type", "content_encoding")
#: Keys as ``Message.dumps`` writes them, and the mark of values that only kombu can decode.
_HEADERS, _PROPERTIES, _MARKED = '"headers": ', ', "properties": ', '"__type__"'
_decode = json.JSONDecoder().raw_decode
#: The longest time to live that a broker is given, in seconds. RabbitMQ takes ten years.
LONGEST = 366 * 86400.0
#: The most runs (messages with a common envelope) of a batch: beyond, too little is alike.
MAX_RUNS = 100
#: Content types that kombu decodes to plain data, without running code.
_SAFE = ["application/json", "application/x-yaml", "application/x-msgpack"]


@dataclass(slots=True)
class PublishResult:
    """The outcome of one call for its rows. A row in none of the lists was not sent."""

    accepted: list[Row] = field(default_factory=list)
    refused: list[tuple[Row, Exception]] = field(default_factory=list)
    #: The broker may have taken these; some of them may have been sent again, and be accepted, or
    #: have been refused by one of several queues.
    unknown: list[Row] = field(default_factory=list)
    #: Why not all rows were sent; None when they were.
    error: Exception | None = None
    #: The messages to publish; when that began, in nanoseconds since 1970; how long it took.
    prepared: list[PreparedMessage] = field(default_factory=list)
    began: int = 0
    seconds: float = 0.0
    #: By ordering key, the id of the first row that was refused.
    _dead_keys: dict[str, int] = field(default_factory=dict)

    def refuse(self, row: Row, error: Exception) -> None:
        self.refused.append((row, error))
        if row.ordering_key:
            before = self._dead_keys.get(row.ordering_key, row.id)
            self._dead_keys[row.ordering_key] = min(before, row.id)

    def sort(
        self,
        sent: Iterable[PreparedMessage],
        answers: Iterable[list[Any]],
        is_row_error: Callable[[BaseException, PreparedMessage], bool],
    ) -> Exception | None:
        """Sort messages by the broker's answers; return the first error that is no row's fault."""
        failure = None
        for item, of_item in zip(sent, answers, strict=False):
            errors = [answer for answer in of_item if isinstance(answer, Exception)]
            if not errors:
                self.accepted.append(item.row)
                continue
            of_row = next((error for error in errors if is_row_error(error, item)), None)
            if of_row is not None:
                self.refuse(item.row, of_row)
            else:
                failure = failure or errors[0]
            # One of several queues may have taken it.
            in_doubt = of_row is None and not all(map(brokers.refused_for_certain, errors))
            if in_doubt or len(errors) < len(of_item):
                self.unknown.append(item.row)
        return failure

    def taken(self, messages: Iterable[PreparedMessage]) -> list[PreparedMessage]:
        """Return those of the messages that were accepted."""
        ids = {row.id for row in self.accepted}
        return [item for item in messages if item.row.id in ids]

    def blocks(self, row: Row) -> bool:
        """Return whether a row has to stay, as an earlier row of its ordering key was refused."""
        is_later = self._dead_keys.get(row.ordering_key, row.id) < row.id
        return is_later and outbox_settings().DEAD_KEY == "block"


@dataclass(slots=True)
class PreparedMessage:
    """A row, decoded and ready for ``Producer.publish``."""

    row: Row
    message: Message
    #: What to declare before (queues, exchanges), by a key that identifies each.
    declare: dict[str, Declaration]
    size: int
    #: The time to live that the broker is given, in seconds; None: none.
    expiration: float | None = None
    #: Whether RabbitMQ has to return it if no queue takes it: see ``needs_route``.
    mandatory: bool = True
    #: The headers as JSON, and a message that differs only in headers, body and id.
    headers: str = ""
    alike: Message | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The arguments of ``Producer.publish`` besides the body."""
        options = {name: getattr(self.message, name) for name in _OPTIONS}
        expiration = {} if self.expiration is None else {"expiration": self.expiration}
        return {**self.message.properties, **options, **expiration}


def decode_rows(
    rows: Iterable[Row], app: Celery, *, now: datetime, outcome: PublishResult, using: str = ""
) -> list[PreparedMessage]:
    """Decode rows for kombu; damaged rows are refused in ``outcome``.

    A row with a receipt gets the header by which the worker finds it on the alias ``using``.
    """
    prepared = []
    runs: dict[tuple[str, str], PreparedMessage | None] = {}
    for row in rows:
        try:
            item = _of_run(row, runs) or _by_itself(row)
            if row.receipt is not None:
                _add_address(item, using)
            if item.message.expires is not None:
                item.expiration = _seconds_left(item.message, app, now)
        except Exception as error:  # a damaged row may fail in any way
            outcome.refuse(row, error)
        else:
            prepared.append(item)
    return prepared


def _by_itself(row: Row) -> PreparedMessage:
    message = Message.loads(row.envelope)
    _check_types(message)
    declare = {repr(each): each for each in message.declare}
    return PreparedMessage(row, message, declare, len(row.body) + len(row.envelope))


def _of_run(
    row: Row, runs: dict[tuple[str, str], PreparedMessage | None]
) -> PreparedMessage | None:
    """Decode the headers; decode the rest once for envelopes that differ only in headers and id."""
    before, _, rest = row.envelope.partition(_HEADERS)
    text, is_found, after = rest.rpartition(_PROPERTIES)
    if not is_found or _MARKED in row.envelope:
        return None
    # NUL occurs in no JSON: if two keys are equal, the id is at the same place in both.
    key = before, after.replace(row.task_id, "\0")
    try:
        if key not in runs and len(runs) < MAX_RUNS:
            common = f"{before}{_HEADERS}{{}}{_PROPERTIES}{after}"
            runs[key] = _first_of_run(row._replace(envelope=common))
        if (first := runs.get(key)) is None:
            return None
        headers, end = _decode(text)
    except (TypeError, ValueError, AttributeError):
        return None  # cut at a wrong place, or damaged: decoding it as a whole will tell
    if end != len(text) or type(headers) is not dict:
        return None
    like = first.message
    properties = {**like.properties, "correlation_id": row.task_id}
    message = Message(like.exchange, like.routing_key, headers, properties, *_behind(like))
    size = len(row.body) + len(row.envelope)
    return PreparedMessage(row, message, first.declare, size, headers=text, alike=first.alike)


def _add_address(item: PreparedMessage, using: str) -> None:
    address = f"{item.row.id}@{using}@{item.row.task_id}"
    item.message.headers[ADDRESS] = address
    if item.headers:
        item.headers = f"{item.headers[:-1]}, {json.dumps(ADDRESS)}: {json.dumps(address)}}}"


def _first_of_run(row: Row) -> PreparedMessage | None:
    """Decode the common part of a run; return None if the id is not its only difference."""
    item = _by_itself(row)
    message = item.message
    is_whole = json.loads(row.envelope).get("headers") == {}
    is_own = message.properties.get("correlation_id") == row.task_id
    if message.is_finished and message.expires is None:
        item.alike = message
    return item if is_whole and is_own and row.envelope.count(row.task_id) == 1 else None


def _seconds_left(message: Message, app: Celery, now: datetime) -> float | None:
    # An expired message is sent without an expiry: the broker would drop it, but a worker has to
    # report it as revoked. So is one that expires in years, a time that RabbitMQ refuses.
    expires = moment(message.expires, app)
    left = (expires - now).total_seconds() if expires else 0.0
    return left if 0 < left < LONGEST else None


def announce(
    outcome: PublishResult,
    *,
    sender: type,
    using: str,
    keep_alive: Callable[[], object] = lambda: None,
) -> None:
    """Send the signals of plain Celery after a publish, and our own, for the accepted jobs.

    Receivers and exporters of spans may be slow: call this when the rows are settled.
    """
    if jobs := outcome.accepted:
        if after_task_publish.receivers:
            for item in outcome.taken(outcome.prepared):
                keep_alive()
                _announce_to_celery(item)
        jobs_published.send_robust(
            sender, using=using, count=len(jobs), seconds=outcome.seconds, jobs=jobs
        )
    trace_batch(outcome)


def _announce_to_celery(item: PreparedMessage) -> None:
    task = item.row.task
    with surrounded(staged=None, drained=task):
        if after_task_publish.has_listeners(task):
            names = ("headers", "exchange", "routing_key")
            sent = {name: getattr(item.message, name) for name in names}
            after_task_publish.send(sender=task, body=_decoded(item), **sent)


def _check_types(message: Message) -> None:
    """Refuse a message that a broker may take, but no worker can read."""
    kinds = map(type, _typed(message))
    for (name, expected), kind in zip(_TYPES.items(), kinds, strict=True):
        if kind is not expected and (name, kind) != ("sent_event", NoneType):
            raise TypeError(
                f"The envelope's {name} must be {expected.__name__}; it is {kind.__name__}."
            )


def _decoded(item: PreparedMessage) -> Any:
    """Return the body as Celery passes it to receivers, or as bytes if decoding could run code."""
    names = ("headers", "content_type", "content_encoding")
    options: dict[str, Any] = {name: getattr(item.message, name) for name in names}
    options["body"] = item.row.body
    try:
        args, *rest = kombu.Message(accept=_SAFE, **options).payload  # decompressed, too
        return (tuple(args), *rest)
    except Exception:  # another serializer, or a body edited by hand
        return item.row.body
