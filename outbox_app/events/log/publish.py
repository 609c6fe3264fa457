"""``publish()`` and ``publish_many()`` write events in the caller's transaction.

Versions are given out under the lock of the stream's head, so they are contiguous and commit in
their order. Everything is checked before the first statement; a conflict of versions leaves the
transaction usable. An event whose message id was published before is returned as it is, so a retry
publishes nothing twice. After the commit the subscriptions are woken.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from operator import attrgetter
from typing import Any
from uuid import UUID

from django.db import IntegrityError, connections, transaction

from ...aliases import model_alias
from ...database.transactions import require_atomic, require_table
from ...jobs.staging.insert import CHUNK_ROWS
from ...process.wakeup import EVENTS, wake_after_commit
from ..exceptions import InvalidEvent, MessageIdConflict, UnknownLog, VersionConflict
from ..models import Event, EventLog
from ..signals import events_published
from .heads import bump_versions, current_version
from .insert import insert, insert_and_bump
from .newevent import (
    ANY,
    CheckedEvent,
    ExpectedVersion,
    NewEvent,
    checked,
    comparable,
    expected_of,
    require_storable,
)

_content = attrgetter("stream", "type", "topic", "data", "metadata")


def publish(
    stream: str,
    type: str,
    data: Any = None,
    *,
    expected_version: ExpectedVersion = ANY,
    topic: str = "",
    metadata: Mapping[str, Any] | None = None,
    message_id: UUID | str | None = None,
    log: type[EventLog] = Event,
    using: str | None = None,
) -> EventLog:
    """Publish one event. The errors below leave the transaction usable.

    Args:
        stream: The event's aggregate, for example ``"order-17"``; at most 255 characters.
        type: What happened, for example ``"order.placed"``; at most 255 characters.
        data: Any value that JSON can hold. Default: ``{}``.
        expected_version: The version that the stream is at, ``NO_STREAM``, or ``ANY`` (default).
        topic: Names a publication inside the log, for example a tenant. Default: none.
        metadata: What receivers need beside the data: trace, user, cause. Default: ``{}``.
        message_id: Makes the call repeatable. Default: a new one.
        log: The log. Default: ``Event``.
        using: Database alias. Default: the log's.

    Returns:
        The row, an instance of ``log``, not committed yet.

    Raises:
        NotAtomic: No transaction is open on the alias, and the setting OUTSIDE is not "stage".
        InvalidEvent, UnknownLog: The event could never be stored, or the log is invalid.
        VersionConflict: The stream is at another version; ``current`` says which.
        MessageIdConflict: The message id belongs to an event with other content.
    """
    content = {} if data is None else data
    event = NewEvent(stream, type, content, metadata or {}, topic, message_id)
    return publish_many([event], expected_version=expected_version, log=log, using=using)[0]


def publish_many(
    events: Iterable[NewEvent],
    *,
    expected_version: ExpectedVersion | Mapping[str, ExpectedVersion] = ANY,
    log: type[EventLog] = Event,
    using: str | None = None,
) -> list[EventLog]:
    """Publish events in their order, all of them or none, with one INSERT per thousand rows.

    Args:
        events: The events. All of them are held in memory.
        expected_version: As for ``publish`` if all events belong to one stream. For several
            streams, a mapping by stream; for a stream that it does not have, ``ANY``.
        log, using: As for ``publish``.

    Returns:
        The rows, in the same order.

    Raises:
        As ``publish``.
    """
    require_log(log)
    using = using or model_alias(log)
    offered = [checked(event, log) for event in events]
    expected = expected_of(expected_version, {each.row.stream for each in offered})
    require_atomic("publish()", using=using)
    return publish_checked(offered, log, expected, using=using)


def publish_checked(
    offered: Sequence[CheckedEvent],
    log: type[EventLog],
    expected: Mapping[str, int | None],
    *,
    using: str,
) -> list[EventLog]:
    """Do what ``publish_many`` does with events that have been checked."""
    require_table(log, using=using, migration="0001_initial" if log is Event else "…")
    require_storable(offered, using=using)
    if not offered:
        return []
    repeatable = [each.row for each in offered if each.repeatable]
    if len({row.message_id for row in repeatable}) < len(repeatable):
        raise InvalidEvent("Two of the events have the same message_id. Give each its own.")
    known = _published_before(repeatable, log, using=using)
    while True:
        new = [each for each in offered if each.row.message_id not in known]
        streams = Counter(each.row.stream for each in new)
        # A savepoint costs two statements: open one only if the writes may have to be undone.
        several = len(streams) > 1 and any(at is not None for at in expected.values())
        undo = bool(repeatable) or several or not connections[using].in_atomic_block
        try:
            with transaction.atomic(using=using) if undo else nullcontext():
                _write(new, streams, expected, log, using=using)
            return [known.get(each.row.message_id, each.row) for each in offered]
        except (IntegrityError, VersionConflict) as error:
            # Another transaction may have published these message ids just now. Lock the rows only
            # after an IntegrityError: without a row, a lock would take the gap, and delay others.
            locked = isinstance(error, IntegrityError) and not connections[using].get_autocommit()
            met = _published_before(repeatable, log, using=using, locked=locked)
            if not met.keys() - known.keys():
                raise
            known |= met


def _write(
    events: list[CheckedEvent],
    streams: Mapping[str, int],
    expected: Mapping[str, int | None],
    log: type[EventLog],
    *,
    using: str,
) -> None:
    if not events:
        return
    table, rows = log._meta.db_table, [event.row for event in events]
    # If a statement fails (a lock timeout, say), this block marks the caller's transaction for
    # rollback, so it cannot commit without its events. A conflict is raised outside the block.
    with transaction.atomic(using=using, savepoint=False):
        if len(events) == 1 and connections[using].vendor == "postgresql":
            [stream] = streams
            done = insert_and_bump(events[0], log, expected=expected.get(stream), using=using)
            refused = [] if done else [stream]
        else:
            heads = bump_versions(table, streams, expected, using=using)
            refused = [stream for stream in streams if stream not in heads]
            if not refused:
                versions = {stream: heads[stream] - n for stream, n in streams.items()}
                for row in rows:
                    versions[row.stream] += 1
                    row.version = versions[row.stream]
                insert(events, log, using=using)
        if not refused:
            events_published.send(log, using=using, events=rows)
            wake_after_commit(using, EVENTS)
    if refused:
        raise _conflict(table, refused[0], expected[refused[0]], using=using)


def _conflict(table: str, stream: str, expected: int | None, *, using: str) -> VersionConflict:
    current = current_version(table, stream, using=using)
    wanted = f"to be at version {expected}" if expected else "not to exist yet"
    found = f"it is at version {current}" if current else "it has no event"
    return VersionConflict(
        f"Stream {stream!r} of {table} was expected {wanted}; {found}. Read what is new in it, "
        "decide again, and publish with the version you have seen.",
        stream=stream,
        current=current,
    )


def _published_before(
    rows: Sequence[EventLog], log: type[EventLog], *, using: str, locked: bool = False
) -> dict[UUID, EventLog]:
    """Return the rows that have these message ids. Raises ``MessageIdConflict`` if one differs."""
    table, known = log._base_manager.using(using), dict[UUID, EventLog]()
    if locked:
        table = table.select_for_update()  # at REPEATABLE READ only a locking read sees new rows
    for start in range(0, len(rows), CHUNK_ROWS):  # databases limit the number of parameters
        ids = [row.message_id for row in rows[start : start + CHUNK_ROWS]]
        known |= {event.message_id: event for event in table.filter(message_id__in=ids)}
    for row in rows:
        other = known.get(row.message_id)
        if other is not None and comparable(_content(other)) != comparable(_content(row)):
            raise MessageIdConflict(
                f"The message id {row.message_id} belongs to {other} (position {other.pk}), which "
                f"differs from the event given now, {row.type!r} for {row.stream!r}. Use a new id."
            )
    return known


def require_log(log: Any) -> None:
    """Raise ``UnknownLog``, or an error of the log, unless one can publish to it."""
    is_log = isinstance(log, type) and issubclass(log, EventLog)
    if not is_log or log._meta.abstract or log._meta.proxy:
        raise UnknownLog(
            "log must be a concrete model, no proxy, derived from "
            f"outbox_app.events.models.EventLog; got {log!r}."
        )
    log.require_publishable()
