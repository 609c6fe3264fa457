"""Writes the versions of a batch: one INSERT for a thousand, from the JSON that is there already.

Receivers of ``events_published`` are given the rows, which are read only if one of them looks.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID

from django.db.models import QuerySet
from django.utils.functional import SimpleLazyObject

from ..eventlog.insert import chunks, insert_rows, own_values
from ..eventlog.newevent import slice_of
from ..process.wakeup import EVENTS, wake_after_commit
from ..signals import events_published
from .request import Call

#: The columns of versions that differ within a batch, with their types on PostgreSQL.
VARYING = {
    "version": "bigint",
    "type": "text",
    "message_id": "uuid",
    "data": "jsonb",
    "command_id": "text",
    "command": "text",
    "request_hash": "text",
    "rejected": "boolean",
    "response": "jsonb",
    "state": "jsonb",
}
_quoted = json.JSONEncoder(ensure_ascii=False).encode


@dataclass(slots=True)
class Step:
    """One version that this transaction writes."""

    call: Call
    version: int
    type: str
    response: str
    #: After it; None where there is no entity yet.
    state: str | None
    rejected: bool = False


def write_versions(cursor: Any, entity: Any, steps: Sequence[Step]) -> None:
    """Write versions of one entity into the open transaction; receivers see them as rows."""
    log, connection = entity.versions, cursor.db
    using = connection.alias
    if entity.states == "last":
        for step in steps[:-1]:
            step.state = None
    stream = steps[0].call.request.id
    same = {"topic": "", "stream": stream, "metadata": "{}", "slice": slice_of(stream)}
    same |= own_values(log, using=using, but=VARYING)
    many = len(steps) > 1 and connection.vendor == "postgresql"
    insert = _insert_json if many else _insert
    sizes = [len(s.call.request.text) + len(s.response) + len(s.state or "") for s in steps]
    columns = len(VARYING) + len(same)
    for chunk in chunks(steps, sizes, columns=columns, connection=connection):
        insert(cursor, log, chunk, same)
        written = SimpleLazyObject(partial(_stored, log, chunk, using=using))
        events_published.send(log, using=using, events=written)
    wake_after_commit(using, EVENTS)


def _stored(log: Any, steps: Sequence[Step], *, using: str) -> list[Any]:
    rows: Any = QuerySet(log, using=using).filter(stream=steps[0].call.request.id)
    numbers = steps[0].version, steps[-1].version
    return list(rows.filter(version__range=numbers).order_by("version"))


def _insert(cursor: Any, log: Any, steps: Sequence[Step], same: dict[str, Any]) -> None:
    native = cursor.db.features.has_native_uuid_field
    params: list[Any] = []
    for step, id in zip(steps, _uuids(len(steps)), strict=True):
        request = step.call.request
        params += (step.version, step.type, str(id) if native else id.hex, request.text)
        params += (request.command_id, request.command, request.hash, step.rejected)
        response = None if step.response == "null" else step.response
        params += (response, step.state, *same.values())
    insert_rows(cursor, log, [*VARYING, *same], params, returning=False)


def _uuids(count: int) -> Iterator[UUID]:
    """Return random ids, of one call of the system: it lets another thread run."""
    random = os.urandom(16 * count)
    return (UUID(bytes=random[at : at + 16], version=4) for at in range(0, 16 * count, 16))


def _insert_json(cursor: Any, log: Any, steps: Sequence[Step], same: dict[str, Any]) -> None:
    """Insert the versions from one JSON text.

    psycopg looks for placeholders in the text of a statement, and the server parses it: for a
    thousand rows of fourteen that takes longer than all the rest.
    """
    rows = ", ".join(
        f'{{"version": {step.version}, "type": {_quoted(step.type)}, "message_id": "{id}", '
        f'"data": {step.call.request.text}, "command_id": {_quoted(step.call.request.command_id)}, '
        f'"command": {_quoted(step.call.request.command)}, '
        f'"request_hash": "{step.call.request.hash}", "rejected": {str(step.rejected).lower()}, '
        f'"response": {step.response}, "state": {step.state or "null"}}}'
        for step, id in zip(steps, _uuids(len(steps)), strict=True)
    )
    fields = {field.column: field for field in log._meta.concrete_fields}
    connection = cursor.db
    quote = connection.ops.quote_name
    literals = ", ".join(f"%s::{fields[name].cast_db_type(connection)}" for name in same)
    columns = ", ".join(map(quote, [*VARYING, *same]))
    sql = (
        f"INSERT INTO {quote(log._meta.db_table)} ({columns}) "
        f"SELECT {', '.join(VARYING)}, {literals} FROM jsonb_to_recordset(%s::jsonb) AS given "
        f"({', '.join(f'{name} {type}' for name, type in VARYING.items())})"
    )
    cursor.execute(sql, [*same.values(), f"[{rows}]"])
