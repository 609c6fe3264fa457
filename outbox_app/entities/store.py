"""Reads and writes the row and the versions of an entity, by SQL that is built once for each type.

Django takes longer to build a statement than the database takes to answer it, and every command
waits for these statements. The database's time is read with the row, even if there is no row. One
INSERT writes a thousand versions, from JSON that exists already. Receivers of ``events_published``
get lazy rows: the database is asked only if a receiver uses them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterator, Mapping, Sequence
from datetime import datetime
from functools import cache, partial
from typing import Any
from uuid import UUID

from django.db import connections
from django.db.models import QuerySet
from django.db.models.expressions import Col
from django.utils.functional import SimpleLazyObject

from ..database.clock import DatabaseNow
from ..database.upsert import insert_rows
from ..events.log.heads import ADD, add_versions
from ..events.log.insert import insert_chunks, own_values
from ..events.log.newevent import slice_of
from ..events.signals import events_published
from ..process.wakeup import EVENTS, wake_after_commit
from .models import PrunedCommand, command_key, log_number
from .request import Call

#: The columns of versions that differ within a batch.
VARYING = (
    *("version", "type", "message_id", "data", "command_id", "command", "request_hash"),
    *("rejected", "response", "state"),
)
#: The columns that answer a repeated command.
ANSWER = ("command_id", "request_hash", "command", "version", "rejected", "response")
_quoted = json.JSONEncoder(ensure_ascii=False).encode


@cache
def _columns(entity: Any) -> list[Col]:
    """Return ``changed_at``, as which the time is read, then the columns of a row but its state."""
    meta = entity._meta
    fields = [field for field in meta.concrete_fields if field.name != "state"]
    return [Col(meta.db_table, field) for field in (meta.get_field("changed_at"), *fields)]


@cache
def _select(entity: Any, using: str, bounded: bool, asked: bool) -> str:
    quote = connections[using].ops.quote_name
    compiler = QuerySet(entity, using=using).query.get_compiler(using)
    now, _ = compiler.compile(DatabaseNow())
    names = (str(column.target.column) for column in _columns(entity)[1:])
    columns = ", ".join(f"entity.{quote(name)}" for name in names)
    table, pk = quote(entity._meta.db_table), quote(entity._meta.pk.column)
    one = "set_config('lock_timeout', %s, true)" if bounded else "1"
    known = joined = ""
    if asked:
        known = "".join(f", known.{quote(name)}" for name in ANSWER)
        pruned = f"{_pruned(entity.versions, 'version', using)} = %s"
        known += f", CASE WHEN known.version IS NULL THEN ({pruned}) END"
        log = quote(entity.versions._meta.db_table)
        joined = f" LEFT JOIN {log} AS known ON known.stream = %s AND known.command_id = %s"
    return (
        f"SELECT one.one, entity.state, {now}, {columns}{known} FROM (SELECT {one} AS one) AS one "
        f"LEFT JOIN {table} AS entity ON entity.{pk} = %s{joined}"
    )


def load(
    cursor: Any, entity: Any, id: str, *, lock: bool, wait: float | None, ids: Collection[str]
) -> tuple[datetime, dict[str, Any] | None, str | None, list[Any] | None]:
    """Return the database's time, a row's values, its state as JSON, and what ``answered`` returns.

    On PostgreSQL this saves two statements: ``wait`` bounds, in seconds, how long the transaction
    waits for each lock; and the answer to a single command id is read by the same snapshot as the
    row. On other databases, and for several ids, the last value is None.
    """
    connection, bounds, asked = cursor.db, [], list[str]()
    if connection.vendor == "postgresql":
        bounds = [] if wait is None else [f"{max(1, round(wait * 1000))}ms"]
        asked = [id, *ids] if len(ids) == 1 else []
    keys = [command_key(*asked)] if asked else []
    sql = _select(entity, connection.alias, bool(bounds), bool(asked))
    cursor.execute(sql + (" FOR UPDATE" if lock else ""), [*keys, *bounds, id, *asked])
    _, text, *values = cursor.fetchone()
    found = None
    if asked:
        *values, pruned = values
        values, known = values[: -len(ANSWER)], values[-len(ANSWER) :]
        found = [] if known[0] is None else [_answer(known)]
        if pruned is not None:
            found = [(*ids, None, None, pruned, None, None)]
    for number, column in enumerate(_columns(entity)):
        own = column.get_db_converters(connection)
        for convert in (*connection.ops.get_db_converters(column), *own):
            values[number] = convert(values[number], column, connection)
    now, *values = values
    if text is None:
        return now, None, None, found
    names = (column.target.attname for column in _columns(entity)[1:])
    return now, dict(zip(names, values, strict=True)), text, found


def update(
    cursor: Any,
    entity: Any,
    id: str,
    version: int,
    count: int,
    values: Mapping[str, Any],
    *,
    step: Call | None,
) -> bool:
    """Bump the head, then the row, and write the row's values, the state as JSON.

    Return whether both were at ``version``. On PostgreSQL one statement does it, as in
    ``publish()``, and also inserts the version of ``step``, which is None on other databases.
    """
    connection, meta, log = cursor.db, entity._meta, entity.versions._meta.db_table
    names, params = _rows(entity.versions, connection, [step]) if step else ([], [])
    fields = [(meta.get_field(name), value) for name, value in values.items()]
    params.append(count)
    params += [v if f.name == "state" else f.get_db_prep_save(v, connection) for f, v in fields]
    params += (id, version)
    if connection.vendor == "postgresql":
        params = [count, log, id, version, *params]
    elif not add_versions(cursor, log, id, count, at=version):
        return False
    cursor.execute(_update(entity, connection.alias, (*values,), (*names,)), params)
    return bool(cursor.rowcount == 1)


@cache
def _update(entity: Any, using: str, names: Sequence[str], of_version: Sequence[str]) -> str:
    connection, meta = connections[using], entity._meta
    quote = connection.ops.quote_name
    changes = "".join(f", {quote(meta.get_field(name).column)} = %s" for name in names)
    sql = (
        f"UPDATE {quote(meta.db_table)} SET version = version + %s{changes} "
        f"WHERE {quote(meta.pk.column)} = %s AND version = %s"
    )
    if connection.vendor != "postgresql":
        return sql
    with_ = f"WITH head AS ({ADD} RETURNING version)"
    if of_version:
        log = quote(entity.versions._meta.db_table)
        into, slots = ", ".join(map(quote, of_version)), ", ".join(["%s"] * len(of_version))
        with_ += f", version AS (INSERT INTO {log} ({into}) SELECT {slots} FROM head)"
    return f"{with_} {sql} AND EXISTS (SELECT FROM head)"


@cache
def _pruned(log: Any, columns: str, using: str) -> str:
    """Return SQL that looks up commands whose versions are pruned, up to their keys."""
    quote = connections[using].ops.quote_name
    table, number = quote(PrunedCommand._meta.db_table), log_number(log._meta.db_table)
    return f"SELECT {columns} FROM {table} WHERE log = {number} AND {quote('key')}"


def answered(cursor: Any, log: Any, id: str, command_ids: Collection[str]) -> list[Any]:
    """Return the ``ANSWER`` of each version with one of these command ids, mostly none.

    Of a version that is pruned only the number is known, as in ``PrunedCommand``. One statement
    reads both tables: a version may be pruned meanwhile.
    """
    connection = cursor.db
    quote, key = connection.ops.quote_name, connection.ops.quote_name("key")
    is_postgres = connection.vendor == "postgresql"
    columns = ", ".join([*map(quote, ANSWER), "NULL::uuid" if is_postgres else "NULL"])
    kept = f"SELECT {columns} FROM {quote(log._meta.db_table)} WHERE stream = %s AND command_id"
    pruned = _pruned(log, f"version, {key}", connection.alias)
    keys = {command_key(id, each): each for each in command_ids}
    params: list[Any] = [id, *command_ids, *keys]
    among = f"IN ({', '.join(['%s'] * len(keys))})"
    sql, source = f"{kept} {among}", f"({pruned} {among}) AS found"
    if is_postgres and len(keys) > 1:
        # With old statistics the planner would read all versions of the entity for IN or ANY.
        params = [[*command_ids], id, [*keys]]
        each = "unnest(%s::{}[]) AS asked (id), LATERAL ({} = asked.id LIMIT 1) AS found"
        sql, source = (
            f"SELECT found.* FROM {each.format('text', kept)}",
            each.format("uuid", pruned),
        )
    nulls = "SELECT NULL, NULL, NULL, found.version, NULL, NULL, found"
    cursor.execute(f"{sql} UNION ALL {nulls}.{key} FROM {source}", params)
    rows = [(row[-1], row[:-1]) for row in cursor.fetchall()]
    found = [(keys[str(key).replace("-", "")], *row[1:]) for key, row in rows if key is not None]
    # The last one counts: a pruned version that was restored has its answer again.
    return found + [_answer(row) for key, row in rows if key is None]


def _answer(row: Sequence[Any]) -> tuple[Any, ...]:
    *known, text = row
    return *known, text and json.loads(text)


def write_versions(cursor: Any, entity: Any, steps: Sequence[Call], *, inserted: bool) -> None:
    """Write versions of one entity into the open transaction; receivers get them as rows."""
    log, using, stream = entity.versions, cursor.db.alias, steps[0].id
    if entity.states == "last":
        for step in steps[:-1]:
            step.state = None

    def written(first: int, last: int) -> list[Any]:
        rows: Any = QuerySet(log, using=using)
        return list(rows.filter(stream=stream, version__range=(first, last)).order_by("version"))

    for chunk in [steps] if inserted else _insert(cursor, log, steps):
        # Even the query is lazy: to build it takes as long as the INSERT.
        events: Any = SimpleLazyObject(partial(written, chunk[0].version, chunk[-1].version))
        events_published.send(log, using=using, events=events)
    wake_after_commit(using, EVENTS)


def _insert(cursor: Any, log: Any, steps: Sequence[Call]) -> Iterator[Sequence[Call]]:
    """Insert versions, and yield those of each statement."""
    connection = cursor.db
    own = own_values(log, using=connection.alias, but=VARYING)
    many = len(steps) > 1 and connection.vendor == "postgresql" and not own
    columns = len(VARYING) + len(_same(steps[0].id)) + len(own)
    for chunk in insert_chunks(steps, _size, columns=columns, connection=connection):
        if many:
            _insert_json(cursor, log, chunk)
        else:
            insert_rows(cursor, log, *_rows(log, connection, chunk))
        yield chunk


def _size(step: Call) -> int:
    return len(step.text) + len(step.response) + len(step.state or "")


def _same(stream: str) -> dict[str, Any]:
    return {"topic": "", "stream": stream, "metadata": "{}", "slice": slice_of(stream)}


def _rows(log: Any, connection: Any, steps: Sequence[Call]) -> tuple[list[str], list[Any]]:
    """Return the column names of versions, and the values of all rows in one list."""
    native, same = connection.features.has_native_uuid_field, _same(steps[0].id)
    names: list[str] = []
    params: list[Any] = []
    for step, id in zip(steps, _uuids(len(steps)), strict=True):
        params += (step.version, step.type, str(id) if native else id.hex, step.text)
        params += (step.command_id, step.command, step.hash, step.rejected)
        response = None if step.response == "null" else step.response
        own = own_values(log, using=connection.alias, but=VARYING)  # each row has its own default
        params += (response, step.state, *same.values(), *own.values())
        names = [*VARYING, *same, *own]
    return names, params


def _uuids(count: int) -> Iterator[UUID]:
    """Return random ids by one system call: each such call lets another thread run."""
    random = os.urandom(16 * count)
    return (UUID(bytes=random[at : at + 16], version=4) for at in range(0, 16 * count, 16))


def _insert_json(cursor: Any, log: Any, steps: Sequence[Call]) -> None:
    """Insert the versions from one JSON text.

    psycopg searches the text of a statement for placeholders, and the server parses it. For a
    thousand rows of fourteen columns that takes longer than everything else.
    """
    rows = ", ".join(
        f'{{"version": {step.version}, "type": {_quoted(step.type)}, "message_id": "{id}", '
        f'"data": {step.text}, "command_id": {_quoted(step.command_id)}, '
        f'"command": {_quoted(step.command)}, "request_hash": "{step.hash}", '
        f'"rejected": {str(step.rejected).lower()}, "response": {step.response}, '
        f'"state": {step.state or "null"}}}'
        for step, id in zip(steps, _uuids(len(steps)), strict=True)
    )
    connection, same = cursor.db, _same(steps[0].id)
    quote = connection.ops.quote_name
    types = {field.column: field.cast_db_type(connection) for field in log._meta.concrete_fields}
    literals = ", ".join(f"%s::{types[name]}" for name in same)
    record = ", ".join(f"{name} {types[name]}" for name in VARYING)
    cursor.execute(
        f"INSERT INTO {quote(log._meta.db_table)} ({', '.join(map(quote, [*VARYING, *same]))}) "
        f"SELECT {', '.join(VARYING)}, {literals} "
        f"FROM jsonb_to_recordset(%s::jsonb) AS given ({record})",
        [*same.values(), f"[{rows}]"],
    )
