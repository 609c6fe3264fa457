"""Writes the versions of a batch: one INSERT for a thousand, from the JSON that is there already.

Receivers of ``events_published`` are given the rows, which are made only if one of them looks.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any
from uuid import UUID, uuid4

from django.db import connections
from django.utils.functional import SimpleLazyObject

from ..eventlog.insert import COLUMNS, chunks, insert_rows, own_values, set_given
from ..eventlog.newevent import slice_of
from ..models import EntityVersion
from ..process.wakeup import EVENTS, wake_after_commit
from ..signals import events_published
from .request import Call

#: Columns that versions have beyond those of every log.
OWN = ("command_id", "command", "request_hash", "rejected", "response", "state")


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


def write_versions(entity: Any, steps: Sequence[Step], *, using: str) -> None:
    """Write versions of one entity into the open transaction; receivers see them as rows."""
    log = entity.versions
    own = own_values(log, using=using)
    names = [*COLUMNS, *OWN, *(name for name in own if name not in OWN)]
    constants = [own[name] for name in names if name in own and name not in OWN]
    native = connections[using].features.has_native_uuid_field
    stream = steps[0].call.request.id
    slice = slice_of(stream)
    if entity.states == "last":
        for step in steps[:-1]:
            step.state = None
    sizes = [len(s.call.request.text) + len(s.response) + len(s.state or "") for s in steps]
    for chunk in chunks(steps, sizes, columns=len(names), using=using):
        ids = [uuid4() for _ in chunk]
        params: list[Any] = []
        for step, id in zip(chunk, ids, strict=True):
            request = step.call.request
            params += ("", stream, step.version, step.type, request.text, "{}", slice)
            params += (str(id) if native else id.hex, request.command_id, request.command)
            response = None if step.response == "null" else step.response
            params += (request.hash, step.rejected, response, step.state, *constants)
        given = insert_rows(log, names, params, using=using)
        rows = SimpleLazyObject(partial(_rows, log, chunk, ids, given, using=using))
        events_published.send(log, using=using, events=rows)
    wake_after_commit(using, EVENTS)


def _rows(
    log: Any, steps: Sequence[Step], ids: Sequence[UUID], given: Sequence[Any], *, using: str
) -> list[EntityVersion]:
    """Return versions that were just written as the rows that they are."""
    rows = []
    for step, id in zip(steps, ids, strict=True):
        request = step.call.request
        rows.append(
            log(
                stream=request.id,
                version=step.version,
                type=step.type,
                data=request.arguments,
                metadata={},
                slice=slice_of(request.id),
                message_id=id,
                command_id=request.command_id,
                command=request.command,
                request_hash=request.hash,
                rejected=step.rejected,
                response=json.loads(step.response),
                state=json.loads(step.state or "null"),
            )
        )
    set_given(rows, given, log, using=using)
    return rows
