"""Writes events: one INSERT for a thousand rows, a MiB, or the database's limit of parameters.

For rows whose values are all known, ``bulk_create`` costs several times as much. The values that
the database gives to a row (position, transaction and time) are set on the row. Rows get their
positions in the order of the list.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from functools import cache
from typing import Any

from django.db import connections
from django.db.models import Field
from django.db.models.expressions import Col

from ...database.upsert import insert_rows, last_inserted
from ...jobs.staging.insert import CHUNK_BYTES, CHUNK_ROWS, chunks
from ..models import EventLog
from .heads import bump_sql
from .newevent import CheckedEvent

#: Columns that every log has: those that an INSERT gives, and those that the database fills in.
COLUMNS = ("topic", "stream", "version", "type", "data", "metadata", "slice", "message_id")
RETURNED = ("id", "txid", "recorded_at")


def insert(events: Sequence[CheckedEvent], log: type[EventLog], *, using: str) -> None:
    """Insert events in the open transaction. Their rows must have versions."""
    connection = connections[using]
    extra = _extra_fields(log)
    names = [*COLUMNS, *(str(field.column) for field in extra)]
    native = connection.features.has_native_uuid_field
    returns = connection.features.can_return_rows_from_bulk_insert
    tail = f" RETURNING {', '.join(RETURNED)}" if returns else ""
    for chunk in insert_chunks(events, _size, columns=len(names), connection=connection):
        params: list[Any] = []
        for row, data, metadata, _ in chunk:
            id = str(row.message_id) if native else row.message_id.hex
            params += (row.topic, row.stream, row.version, row.type, data, metadata, row.slice, id)
            params += (_stored(f, row, connection) for f in extra)
        with connection.cursor() as cursor:
            insert_rows(cursor, log, names, params, tail=tail)
            if returns:
                returned = cursor.fetchall()
            else:
                returned = last_inserted(cursor, log, RETURNED, len(chunk))
        set_returned([event.row for event in chunk], returned, log, using=using)


def _size(event: CheckedEvent) -> int:
    return len(event.data) + len(event.metadata)


def insert_and_bump(
    event: CheckedEvent, log: type[EventLog], *, expected: int | None, using: str
) -> bool:
    """Bump the stream and insert one event, by one statement. Only on PostgreSQL.

    Returns False, and writes nothing, if the stream is not at the version ``expected``.
    """
    row, connection = event.row, connections[using]
    extra = _extra_fields(log)
    head, params = bump_sql(log._meta.db_table, row.stream, expected=expected)
    fields: list[Any] = [*map(log._meta.get_field, COLUMNS), *extra]
    # The literals of a SELECT have no type of their own, so each one is cast.
    values = [
        "head.version" if f.name == "version" else f"%s::{f.cast_db_type(connection)}"
        for f in fields
    ]
    # The statement may have waited for the stream's lock: the time of its beginning is too early.
    fields.append(log._meta.get_field("recorded_at"))
    values.append("CLOCK_TIMESTAMP()")
    names = ", ".join(connection.ops.quote_name(str(field.column)) for field in fields)
    sql = (
        f"WITH head AS ({head}) INSERT INTO {connection.ops.quote_name(log._meta.db_table)} "
        f"({names}) SELECT {', '.join(values)} FROM head RETURNING version, {', '.join(RETURNED)}"
    )
    params += (row.topic, row.stream, row.type, event.data, event.metadata, row.slice)
    params.append(str(row.message_id))
    params += (_stored(f, row, connection) for f in extra)
    with connection.cursor() as cursor:
        cursor.execute(sql, params)
        returned = cursor.fetchone()
    if returned is None:
        return False
    row.version = returned[0]
    set_returned([row], [returned[1:]], log, using=using)
    return True


def own_values(log: type[EventLog], *, using: str, but: Collection[str] = ()) -> dict[str, Any]:
    """Return a derived log's own columns, with their values for a row that sets none of them."""
    fields = [field for field in _extra_fields(log) if field.name not in but]
    row, connection = log() if fields else None, connections[using]
    return {str(f.column): _stored(f, row, connection) for f in fields}  # type: ignore[arg-type]


def _stored(field: Field[Any, Any], row: EventLog, connection: Any) -> Any:
    return field.get_db_prep_save(field.pre_save(row, True), connection)  # sets auto_now_add, too


def insert_chunks(
    rows: Sequence[Any], size: Callable[[Any], int], *, columns: int, connection: Any
) -> Iterator[list[Any]]:
    """Yield the rows of each statement. ``size`` returns the characters of JSON in a row."""
    limit = (connection.features.max_query_params or 10**6) // columns
    return chunks(rows, rows=min(CHUNK_ROWS, limit), bytes=CHUNK_BYTES, size=size)


@cache
def _extra_fields(log: type[EventLog]) -> list[Field[Any, Any]]:
    """Return a derived log's own fields, except those that the database fills in."""
    known = {*COLUMNS, *RETURNED}
    return [
        field
        for field in log._meta.concrete_fields
        if field.name not in known
        and not field.generated
        and (field.has_default() or not field.has_db_default())
    ]


def set_returned(
    rows: list[EventLog], returned: Sequence[Any], log: type[EventLog], *, using: str
) -> None:
    connection = connections[using]
    column = Col(log._meta.db_table, log._meta.get_field("recorded_at"))
    converters = connection.ops.get_db_converters(column)
    for row, values in zip(rows, returned, strict=True):
        row.pk, row.txid, recorded_at = values
        for convert in converters:
            recorded_at = convert(recorded_at, column, connection)
        row.recorded_at = recorded_at
        row._state.adding, row._state.db = False, using
