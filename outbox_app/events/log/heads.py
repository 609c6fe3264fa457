"""The heads of streams: who may write the next versions.

A head's row is locked from the statement that bumps it until the transaction ends, so the versions
of a stream are contiguous and commit in their order. One call bumps its streams in the order of
their names: two transactions that write several streams in one call cannot deadlock.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from django.db import connections

from ...database.upsert import insert_rows
from ..models import StreamHead

#: The most streams that one statement bumps.
CHUNK = 500
_UPSERT = (
    " ON CONFLICT (log, stream) DO UPDATE SET version = outbox_stream.version + excluded.version"
)
ADD = (
    "UPDATE outbox_stream SET version = version + %s "
    "WHERE log = %s AND stream = %s AND version = %s"
)


def bump_versions(
    log: str, counts: Mapping[str, int], expected: Mapping[str, int | None], *, using: str
) -> dict[str, int]:
    """Add to each stream its count of new events; return the new versions.

    A stream that is not at the version ``expected`` (0: no stream; None: any) is left as it is, and
    not returned.
    """
    if all(expected.get(stream) is None for stream in counts):
        return _bump_any(log, counts, using)
    versions: dict[str, int] = {}
    for stream, count in sorted(counts.items()):
        at = expected.get(stream)
        if at is None:
            versions |= _bump_any(log, {stream: count}, using)
        elif _bump_at(log, stream, at, count, using):
            versions[stream] = at + count
    return versions


def bump_sql(log: str, stream: str, *, expected: int | None) -> tuple[str, list[Any]]:
    """Return SQL for PostgreSQL that adds one event to a stream, and returns its version."""
    if expected:
        return f"{ADD} RETURNING version", [1, log, stream, expected]
    conflict = " ON CONFLICT (log, stream) DO NOTHING" if expected == 0 else _UPSERT
    insert = "INSERT INTO outbox_stream (log, stream, version) VALUES (%s, %s, %s)"
    return f"{insert}{conflict} RETURNING version", [log, stream, 1]


def current_version(log: str, stream: str, *, using: str) -> int:
    """Return the version of a stream as this transaction sees it; 0 without events."""
    heads = StreamHead.objects.using(using).filter(log=log, stream=stream)
    if connections[using].vendor == "mysql":
        # At REPEATABLE READ only a locking read sees new rows. The attempt to bump locked this one.
        heads = heads.select_for_update()
    return heads.values_list("version", flat=True).first() or 0


def _bump_any(log: str, counts: Mapping[str, int], using: str) -> dict[str, int]:
    connection = connections[using]
    returns = connection.features.can_return_rows_from_bulk_insert
    tail = _UPSERT
    if connection.vendor == "mysql":
        tail = " ON DUPLICATE KEY UPDATE version = outbox_stream.version + VALUES(version)"
    tail += " RETURNING stream, version" if returns else ""
    streams = sorted(counts)
    versions: dict[str, int] = {}
    for start in range(0, len(streams), CHUNK):
        chunk = streams[start : start + CHUNK]
        rows = [value for stream in chunk for value in (log, stream, counts[stream])]
        with connection.cursor() as cursor:
            insert_rows(cursor, StreamHead, ("log", "stream", "version"), rows, tail=tail)
            if not returns:
                slots = ", ".join(["%s"] * len(chunk))
                heads = f"outbox_stream WHERE log = %s AND stream IN ({slots})"
                cursor.execute(f"SELECT stream, version FROM {heads}", [log, *chunk])
            versions.update(cursor.fetchall())
    return versions


def _bump_at(log: str, stream: str, version: int, count: int, using: str) -> bool:
    """Bump a stream if it is at the version (0: it does not exist); return whether it was."""
    with connections[using].cursor() as cursor:
        if version:
            return add_versions(cursor, log, stream, count, at=version)
        # Bump the head, and put it back if it existed. On MySQL two transactions with an INSERT
        # IGNORE would share the lock on the head, and their next statements would deadlock.
        bumped = _bump_any(log, {stream: count}, using)[stream]
        return bumped == count or not add_versions(cursor, log, stream, -count, at=bumped)


def add_versions(cursor: Any, log: str, stream: str, count: int, *, at: int) -> bool:
    """Bump a stream that exists, if it is at a version; return whether it was.

    On MySQL an UPDATE locks only the head. An upsert also locks the gap beside it, and delays
    transactions that create streams there.
    """
    cursor.execute(ADD, [count, log, stream, at])
    return bool(cursor.rowcount)
