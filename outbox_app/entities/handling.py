"""Runs handlers: in their callers' contexts, on a state of their own, away from the databases.

What a handler gives beside its answer (jobs, events, ``on_commit`` callbacks) is held until the
batch is written, and dropped with a command that fails or is rejected.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import cache, wraps
from typing import Any

from django.core.exceptions import ValidationError
from django.db import connections, transaction
from django.db.models import CheckConstraint, Field, QuerySet

from ..aliases import log_alias
from ..eventlog.newevent import CheckedEvent, NewEvent, canonical, checked
from ..eventlog.publish import publish_checked, require_log
from ..exceptions import InvalidCommand, InvalidEvent, NotAtomic, StatementRefused, TransactionEnded
from ..jobs.staging.insert import StagedBatch, collect_in
from ..models import EntityRow, EventLog
from ..process.enclosure import enclosed
from .declaration import CommandSpec, Rejected, commands_of, rules_of
from .request import Caller, Rejection

#: Where gifts end: how many jobs by alias, events, and callbacks there are.
Mark = tuple[dict[str, int], int, int]

#: Characters of the code of a rejection.
MAX_CODE = 100
#: Fields of every type.
BASE = {field.name for field in EntityRow._meta.concrete_fields}


class TypeSpec:
    """What an entity type declares."""

    def __init__(self, entity: Any) -> None:
        self.entity = entity
        self.commands = commands_of(entity)
        self.rules = rules_of(entity)
        #: Fields of the project's own.
        self.fields: dict[str, Field[Any, Any]] = {
            f.attname: f for f in entity._meta.concrete_fields if f.name not in BASE
        }
        self.derives_columns = entity.columns is not EntityRow.columns
        #: The names of those that a unique index or an exclusion constraint is about.
        self.unique = {name for name, field in self.fields.items() if field.unique}
        for constraint in entity._meta.constraints:
            if not isinstance(constraint, CheckConstraint):
                # Without fields it is about expressions, or an exclusion: any of them counts.
                names = getattr(constraint, "fields", ())
                about = (n for n, f in self.fields.items() if not names or f.name in names)
                self.unique.update(about)


@cache
def spec_of(entity: Any) -> TypeSpec:
    return TypeSpec(entity)


class Gifts:
    """What handlers gave beside their answers, in their order; refuses their statements."""

    def __init__(self, *, using: str) -> None:
        self.using, self.connection = using, connections[using]
        self.jobs = StagedBatch()
        self.events: list[tuple[type[EventLog], CheckedEvent]] = []
        #: The command that runs, and whether it may query the alias.
        self.command, self.may_query = "", False

    def mark(self) -> Mark:
        """Return where the gifts end now."""
        jobs = {alias: len(waiting) for alias, waiting in self.jobs.waiting.items()}
        return jobs, len(self.events), len(self.connection.run_on_commit)

    def drop(self, mark: Mark) -> None:
        """Forget those that came after the mark."""
        jobs, events, callbacks = mark
        for alias, waiting in self.jobs.waiting.items():
            del waiting[jobs.get(alias, 0) :]
        del self.events[events:]
        del self.connection.run_on_commit[callbacks:]

    def keep_callbacks(self, mark: Mark, caller: Caller) -> None:
        """Let those that came after the mark run in their caller's context, each for itself."""
        callbacks: list[Any] = self.connection.run_on_commit
        for number in range(mark[2], len(callbacks)):
            sids, function, _ = callbacks[number]
            callbacks[number] = (sids, named(function, caller.run), True)

    def publish(self, event: NewEvent, log: type[EventLog]) -> None:
        """Take an event. Raises ``InvalidEvent``, ``NotAtomic``."""
        require_log(log)
        if log_alias(log) != self.using:
            raise NotAtomic(
                f"{self.command} publishes to {log.__name__} on {log_alias(log)!r}, but runs on "
                f"{self.using!r}: it would not be atomic. Publish from a subscription on its "
                "versions."
            )
        self.events.append((log, checked(event, log)))

    def write(self) -> None:
        """Write the events and the jobs into the open transaction."""
        by_log: dict[type[EventLog], list[CheckedEvent]] = defaultdict(list)
        for log, event in self.events:
            by_log[log].append(event)
        for log in sorted(by_log, key=lambda log: log._meta.db_table):
            publish_checked(by_log[log], log, {}, using=self.using)
        self.jobs.write()

    @contextmanager
    def without_statements(self) -> Iterator[None]:
        """Refuse them on every connection of this thread."""
        with ExitStack() as stack:
            for connection in connections.all():
                if connection.connection is None:
                    # Opened by a statement that is refused, its session would lack its settings.
                    stack.callback(connection.close)
                stack.enter_context(connection.execute_wrapper(self._refuse))
            yield

    def _refuse(self, execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        alias = context["connection"].alias
        if self.may_query and alias == self.using:
            return execute(sql, params, many, context)
        raise StatementRefused(
            f"The command {self.command} may not query a database, here {alias!r}: it may run "
            "several times before its answer is committed. Pass it what it needs as arguments; or, "
            "for the database of the entity, declare it with @command(atomic=True)."
        )


def named(function: Callable[[], Any], call: Callable[[Any], Any]) -> Callable[[], Any]:
    """Return a callback that calls a function so; Django names it in logs, also for a partial."""

    @wraps(function)
    def run() -> Any:
        return call(function)

    return run


#: Those of the handler that runs in this context; None outside of handlers.
running: ContextVar[Gifts | None] = ContextVar("outbox_app.entities.running", default=None)


def require_running() -> Gifts:
    """Return the gifts of the handler that runs here. Raises ``InvalidCommand``."""
    gifts = running.get()
    if gifts is None:
        raise InvalidCommand(
            "publish() and stage() of an entity belong into its commands. Elsewhere, call "
            "outbox_app.publish() and outbox_app.stage()."
        )
    return gifts


@dataclass(slots=True)
class Handled:
    """What a handler left, as it is stored."""

    #: Decoded from the text.
    state: Any
    text: str
    #: None: the type has none of its own.
    columns: dict[str, Any] | None
    #: Of each command: the response, as readers will see it, or the rejection; and its JSON.
    answers: list[tuple[Any, str]]
    #: From before the handler, where it may write and an index may still refuse its columns.
    savepoint: str | None = None


def handle(
    types: TypeSpec, spec: CommandSpec, instance: Any, given: Any, caller: Caller, gifts: Gifts
) -> Handled:
    """Run a handler, then the rules; it is given its arguments, for ``batch=True`` a list of them.

    Raises ``Rejected`` where the handler, or a rule, has said no; ``InvalidCommand`` where it left
    something that cannot be stored; and what the handler raised.
    """
    name = gifts.command = spec.full_name
    what = f"The command {name}"

    def run() -> Handled:
        running.set(gifts)
        collect_in(gifts.jobs)
        try:
            response = (
                spec.handler(instance, given) if spec.batch else spec.handler(instance, **given)
            )
        finally:
            if gifts.connection.closed_in_transaction:
                raise TransactionEnded(f"{what} closed the connection of its transaction.")
        left = _checked(name, types, instance)
        if not spec.batch:
            return Handled(*left, [storable(name, "the response", response)])
        if not isinstance(response, list) or len(response) != len(given):
            raise InvalidCommand(
                f"{name} must return a list with an answer for each of {len(given)} commands; it "
                f"returned {response!r:.100}."
            )
        answers = [
            stored_rejection(name, each)
            if isinstance(each, Rejected)
            else storable(name, "the response", each)
            for each in response
        ]
        return Handled(*left, answers)

    if not spec.atomic:
        return caller.run(run)
    gifts.may_query = True
    try:
        savepoint = transaction.savepoint(using=gifts.using) if types.unique else None
        with enclosed(what, using=gifts.using), transaction.atomic(using=gifts.using):
            handled = caller.run(run)
        handled.savepoint = savepoint
        return handled
    finally:
        gifts.may_query = False


def _checked(name: str, types: TypeSpec, instance: Any) -> tuple[Any, str, dict[str, Any] | None]:
    if instance.state is None:
        raise InvalidCommand(f"{name} left self.state unset.")
    state, text = storable(name, "self.state", instance.state)
    if not types.rules and not types.derives_columns:
        return state, text, None
    instance.state = json.loads(text)
    for rule, holds in types.rules.items():
        if not holds(instance):
            first = (holds.__doc__ or f"The rule {rule} is broken.").strip().splitlines()[0]
            raise Rejected(first, code=rule)
    return state, text, columns_of(name, types, instance) if types.derives_columns else None


def columns_of(name: str, types: TypeSpec, instance: Any) -> dict[str, Any]:
    """Return what the type takes from the state into fields of its own.

    Raises ``InvalidCommand`` where that does not fit.
    """
    values: dict[str, Any] = {}
    for column, value in instance.columns().items():
        field = types.fields.get(column)
        if field is None:
            raise InvalidCommand(
                f"{name}: columns() names {column!r}, which is no field of the type's own."
            )
        try:
            values[column] = field.to_python(value)
            if values[column] is None and not field.null:
                raise ValidationError("it may not be None.")
            field.run_validators(values[column])
        except ValidationError as error:
            raise InvalidCommand(
                f"{name}: columns() gives {column!r} a value that does not fit, {value!r:.100}: "
                f"{' '.join(error.messages)}"
            ) from None
    return values


def storable(name: str, what: str, value: Any) -> tuple[Any, str]:
    """Return a value as readers will see it, and its JSON. Raises ``InvalidCommand``."""
    try:
        return canonical(what, value)
    except InvalidEvent as error:
        raise InvalidCommand(f"{name}: {error}") from None


def stored_rejection(name: str, error: Rejected) -> tuple[Rejection, str]:
    """Return a rejection as it is stored, and its JSON. Raises ``InvalidCommand``."""
    code = str(error.code or "")
    if len(code) > MAX_CODE:
        raise InvalidCommand(
            f"{name}: the code of the rejection has more than {MAX_CODE} characters."
        )
    stored, text = storable(name, "the rejection", {"code": code, "text": str(error.text)})
    return Rejection(**stored), text


def violated(types: TypeSpec, instance: Any, error: Exception, *, using: str) -> Rejected | None:
    """Return how an index has refused a row: by the constraint's name, or by the unique field's.

    None where no index of the type's own did.
    """
    model = types.entity
    rows: Any = QuerySet(model, using=using).exclude(pk=instance.pk)
    refused: list[tuple[str, str, bool]] = []
    for constraint in model._meta.constraints:
        if not isinstance(constraint, CheckConstraint):
            text = str(constraint.get_violation_error_message())
            refused.append((constraint.name, text, _fails(constraint, instance, using)))
    for name, field in types.fields.items():
        if field.unique:
            [text] = instance.unique_error_message(model, [field.name]).messages
            value = getattr(instance, name)
            taken = value is not None and rows.filter(**{name: value}).exists()
            refused.append((field.name, text, taken))
    # What the snapshot of the caller's transaction hides, the database names.
    named = [(name, text, name in str(error)) for name, text, _ in refused]
    return next((Rejected(text, code=name) for name, text, yes in refused + named if yes), None)


def _fails(constraint: Any, instance: Any, using: str) -> bool:
    try:
        constraint.validate(type(instance), instance, using=using)
    except ValidationError:
        return True
    return False
