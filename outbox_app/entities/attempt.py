"""One command in one transaction: load, look up, run, compare and set, record.

The command id is looked up *after* the version is read. A twin that committed before is found; one
that commits later has moved the version, so the compare-and-set of the head changes no row and all
is done anew. The unique index on (stream, command_id) is the backstop. The head is locked first,
always: two orders would deadlock. See ``execution`` for what is done anew, and why.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from datetime import datetime
from typing import Any
from uuid import uuid4

from django.db import connections, transaction
from django.db.models import F, QuerySet, Value

from ..enclosure import enclosed
from ..eventlog.heads import bump_versions, current_version
from ..eventlog.insert import insert
from ..eventlog.newevent import CheckedEvent, canonical, slice_of
from ..exceptions import (
    CommandIdConflict,
    DamagedEntity,
    InvalidCommand,
    InvalidEvent,
    StatementRefused,
    UnknownEntity,
    VersionConflict,
)
from ..failpoints import failpoint
from ..models import DatabaseNow, EntityVersion, StreamHead
from ..process.wakeup import EVENTS, wake_after_commit
from ..signals import events_published
from .declaration import REJECTED, CommandSpec, Rejected, commands_of
from .request import Outcome, Rejection, Request

#: Characters of the code of a rejection.
MAX_CODE = 100


#: The command whose handler runs in this context.
handling: ContextVar[str] = ContextVar("outbox_app.entities.handling", default="")


class Moved(Exception):
    """Another transaction was ahead: the version that was read is not the newest any more."""


@dataclass(slots=True)
class Loaded:
    """An entity as this transaction sees it."""

    version: int
    #: None: there is no row.
    state: Any
    exists: bool
    now: datetime


def attempt(entity: Any, request: Request, *, using: str, locked: bool) -> Outcome:
    """Answer a command in the open transaction.

    Args:
        entity: The class of the entity.
        request: The command.
        using: Database alias.
        locked: Lock the head first, so that no other command can come between.

    Raises:
        Moved: Another command was ahead. The transaction must be rolled back.
        CommandIdConflict, DamagedEntity, InvalidCommand, UnknownEntity, VersionConflict: Nothing
            was written.
    """
    table = entity.versions._meta.db_table
    seen, head = _lock(table, request.id, using=using) if locked else (None, None)
    loaded = _load(entity, request.id, head, using=using)
    failpoint("entity_loaded")
    hidden = range((seen or 0) + 1, (head or 0) + 1)
    if answered := _answered(entity.versions, request, hidden, using=using):
        return answered
    if locked and loaded.version != head:
        raise _damaged(entity, request, loaded)
    spec = _spec(entity, request)
    _check_expected(table, request, loaded)
    if not loaded.exists and not spec.creates:
        raise UnknownEntity(
            f"There is no {entity.__name__} {request.id!r}, and the command {spec.name!r} does not "
            "create one."
        )
    state, response, rejection = _decide(entity, request, spec, loaded, using=using)
    failpoint("entity_handled")
    row = _version(entity, request, spec, loaded, state, response, rejection)
    expected = {request.id: None if locked else loaded.version}
    if not bump_versions(table, {request.id: 1}, expected, using=using):
        raise Moved
    _write_state(entity, request, loaded, state, rejection, row.version, using=using)
    event = CheckedEvent(row, request.text, "{}", repeatable=False)
    insert([event], entity.versions, using=using)
    events_published.send(entity.versions, using=using, events=[row])
    wake_after_commit(using, EVENTS)
    failpoint("entity_written")
    return Outcome(response if rejection is None else None, row.version, rejection, replayed=False)


def _lock(table: str, id: str, *, using: str) -> tuple[int, int]:
    """Lock the head of an entity until the transaction ends.

    Returns:
        Its version as a plain read sees it, and as it is.
    """
    heads = StreamHead.objects.using(using).filter(log=table, stream=id)
    seen = heads.values_list("version", flat=True).first() or 0
    if not seen or connections[using].vendor == "sqlite":
        # A head that is absent is made: a lock on it would be one on a gap, where others insert,
        # and would hold off no other creator. SQLite has no other lock than a write.
        bump_versions(table, {id: 0}, {}, using=using)
    head = heads.select_for_update().values_list("version", flat=True).get()
    return seen, head


def _load(entity: Any, id: str, head: int | None, *, using: str) -> Loaded:
    rows: Any = QuerySet(entity, using=using).filter(pk=id)
    if head and connections[using].vendor == "mysql":
        rows = rows.select_for_update()  # at REPEATABLE READ a plain read shows the old version
    found = rows.annotate(now_=DatabaseNow()).values_list("version", "state", "now_").first()
    if found is not None:
        version, state, now = found
        return Loaded(version, state, exists=True, now=now)
    if head is None:
        head = current_version(entity.versions._meta.db_table, id, using=using)
    return Loaded(head, None, exists=False, now=_now(entity, using=using))


def _now(entity: Any, *, using: str) -> datetime:
    """Return the time by the database's clock: no row of the entity can be asked for it."""
    connection: Any = connections[using]
    rows: Any = QuerySet(entity, using=using)
    field = entity._meta.get_field("changed_at")
    sql, params = rows.query.get_compiler(using).compile(DatabaseNow())
    with connection.cursor() as cursor:
        cursor.execute(f"SELECT {sql}", params)
        [value] = cursor.fetchone()
    for convert in connection.ops.get_db_converters(Value(None, output_field=field)):
        value = convert(value, field, connection)
    return value  # type: ignore[no-any-return]


def _answered(versions: Any, request: Request, hidden: range, *, using: str) -> Outcome | None:
    rows: Any = QuerySet(versions, using=using).filter(stream=request.id)
    known = rows.filter(command_id=request.command_id).first()
    if known is None and hidden and connections[using].vendor == "mysql":
        # The snapshot of the caller's transaction hides them. They are read with a lock by their
        # versions, which are there: a lock on an id that is absent would be one on a gap.
        newer = rows.filter(version__in=hidden).select_for_update()
        known = next((row for row in newer if row.command_id == request.command_id), None)
    return None if known is None else _replayed(known, request)


def _replayed(known: EntityVersion, request: Request) -> Outcome:
    """Return the first answer to a command id.

    Raises:
        CommandIdConflict: It was given to another command.
    """
    if known.request_hash != request.hash:
        raise CommandIdConflict(
            f"The command id {request.command_id!r} of {request.id!r} belongs to another request: "
            f"{known.command!r} at version {known.version}, or the same with other arguments. Use "
            "a new id for a new request."
        )
    answer: Any = known.response
    if known.rejected:
        return Outcome(None, known.version, Rejection(**answer), replayed=True)
    return Outcome(answer, known.version, None, replayed=True)


def _spec(entity: Any, request: Request) -> CommandSpec:
    specs = commands_of(entity)
    if request.command not in specs:
        raise InvalidCommand(
            f"{entity.__name__} has no command {request.command!r}. It has: "
            f"{', '.join(sorted(specs)) or 'none'}."
        )
    specs[request.command].check(request.arguments)
    return specs[request.command]


def _check_expected(table: str, request: Request, loaded: Loaded) -> None:
    if request.expected not in (None, loaded.version):
        raise VersionConflict(
            f"{request.id!r} of {table} was expected at version {request.expected}; it is at "
            f"version {loaded.version}. Read it again, decide again, and send it with the version "
            "you have seen.",
            stream=request.id,
            current=loaded.version,
        )


def _decide(
    entity: Any, request: Request, spec: CommandSpec, loaded: Loaded, *, using: str
) -> tuple[Any, Any, Rejection | None]:
    """Run the handler on a copy of the state; return the new state, the response, a rejection."""
    if loaded.exists and spec.creates:
        rejection = Rejection("exists", f"{entity.__name__} {request.id!r} exists already.")
        return loaded.state, None, rejection
    # Both from text, anew each time: what a handler changes in them has no effect elsewhere.
    state = json.loads(json.dumps(loaded.state))
    instance = entity(pk=request.id, version=loaded.version, state=state)
    instance.now = loaded.now
    callbacks = len(connections[using].run_on_commit)
    try:
        with _guard(entity, spec, using=using):
            context = copy_context()
            context.run(handling.set, f"{entity.__name__}.{spec.name}")
            response = context.run(spec.handler, instance, **json.loads(request.text))
    except Rejected as error:
        _drop_callbacks(callbacks, using=using)
        return loaded.state, None, _stored_rejection(entity, spec, error)
    try:
        if instance.state is None:
            raise InvalidEvent(f"{spec.name!r} left self.state unset.")
        state, _ = canonical("self.state", instance.state)
        response, _ = canonical("the response", response)
    except InvalidEvent as error:
        raise InvalidCommand(f"{entity.__name__}.{spec.name}: {error}") from None
    return state, response, None


def _drop_callbacks(kept: int, *, using: str) -> None:
    """Forget the ``on_commit`` callbacks of a rejected command, whose answer is committed."""
    del connections[using].run_on_commit[kept:]


def _stored_rejection(entity: Any, spec: CommandSpec, error: Rejected) -> Rejection:
    code, text = str(error.code or ""), str(error.text)
    try:
        if len(code) > MAX_CODE:
            raise InvalidEvent(f"the code of the rejection has more than {MAX_CODE} characters.")
        stored, _ = canonical("the rejection", {"code": code, "text": text})
    except InvalidEvent as invalid:
        raise InvalidCommand(f"{entity.__name__}.{spec.name}: {invalid}") from None
    return Rejection(**stored)


@contextmanager
def _guard(entity: Any, spec: CommandSpec, *, using: str) -> Iterator[None]:
    what = f"The command {entity.__name__}.{spec.name}"

    def refuse(execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        raise StatementRefused(
            f"{what} may not query a database, here {context['connection'].alias!r}: it may run "
            "several times before its answer is committed. Pass it what it needs as arguments; or, "
            "for the database of the entity, declare it with @command(atomic=True)."
        )

    with ExitStack() as stack:
        for connection in connections.all():
            if connection.alias == using and spec.atomic:
                continue
            if connection.connection is None:
                # Opened by a statement that is refused, its session would lack its settings.
                stack.callback(connection.close)
            stack.enter_context(connection.execute_wrapper(refuse))
        if spec.atomic:
            stack.enter_context(enclosed(what, using=using))
            stack.enter_context(transaction.atomic(using=using))
        yield


def _version(
    entity: Any,
    request: Request,
    spec: CommandSpec,
    loaded: Loaded,
    state: Any,
    response: Any,
    rejection: Rejection | None,
) -> EntityVersion:
    type_ = spec.event or f"{entity._meta.model_name}.{spec.name}"
    refusal = None if rejection is None else {"code": rejection.code, "text": rejection.text}
    row: EntityVersion = entity.versions(
        stream=request.id,
        version=loaded.version + 1,
        type=type_ if rejection is None else type_ + REJECTED,
        data=request.arguments,
        metadata={},
        slice=slice_of(request.id),
        message_id=uuid4(),
        command_id=request.command_id,
        command=request.command,
        request_hash=request.hash,
        rejected=rejection is not None,
        response=response if refusal is None else refusal,
        state=state,
    )
    return row


def _write_state(
    entity: Any,
    request: Request,
    loaded: Loaded,
    state: Any,
    rejection: Rejection | None,
    version: int,
    *,
    using: str,
) -> None:
    rows: Any = QuerySet(entity, using=using)
    if loaded.exists:
        changes: dict[str, Any] = {"version": F("version") + 1}
        if rejection is None:
            changes |= {"state": state, "changed_at": loaded.now}
        if rows.filter(pk=request.id, version=loaded.version).update(**changes) != 1:
            raise _damaged(entity, request, loaded)
    elif rejection is None:
        row = entity(pk=request.id, version=version, state=state, changed_at=loaded.now)
        rows.bulk_create([row])


def _damaged(entity: Any, request: Request, loaded: Loaded) -> DamagedEntity:
    return DamagedEntity(
        f"The row of {entity.__name__} {request.id!r} is at version {loaded.version}, and its "
        "versions end elsewhere: it was edited by hand. Nothing was written."
    )
