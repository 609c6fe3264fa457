"""Runs handlers: in their callers' contexts, on a copy of the state, without the databases.

Jobs, events and ``on_commit`` callbacks of a handler are held until the batch is written. They are
dropped if the command fails or is rejected.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import UTC
from decimal import Decimal
from functools import partial
from typing import Any

from django.core.exceptions import ImproperlyConfigured, ValidationError
from django.db import connections, models, transaction
from django.db.backends.utils import format_number
from django.db.models import DateTimeField, DecimalField
from django.utils.timezone import is_aware

from ..aliases import model_alias
from ..database.callbacks import named_callback
from ..database.encoding import unstorable
from ..database.transaction_guard import guarded, require_same
from ..database.transactions import after_commit
from ..events.exceptions import InvalidEvent
from ..events.log.newevent import CheckedEvent, NewEvent, canonical, checked, require_storable
from ..events.log.publish import publish_checked, require_log
from ..events.models import EventLog
from ..exceptions import NotAtomic
from ..fields import JSONField, has_own_json
from ..jobs.staging.detector import watching_callbacks
from ..jobs.staging.insert import StagedBatch, collect_in
from .declaration import CommandSpec, Rejected, TypeSpec
from .exceptions import InvalidCommand, StatementRefused
from .request import Call, Rejection


class HeldEffects:
    """Holds the jobs, events and callbacks of handlers, in order; refuses their statements."""

    def __init__(self, *, using: str) -> None:
        self.using = using
        self.connection: Any = connections[using]
        self.jobs = StagedBatch()
        self.events: list[tuple[type[EventLog], CheckedEvent]] = []
        #: The command that runs, and whether it may query the alias.
        self.command, self.may_query = "", False

    @contextmanager
    def of(self, call: Call, spec: CommandSpec) -> Iterator[None]:
        """Keep what a command stages, publishes or defers, unless the block raises."""
        self.command, self.may_query = spec.full_name, spec.atomic
        jobs = {alias: len(waiting) for alias, waiting in self.jobs.waiting.items()}
        begin = object()
        # A marker, not an index: immediate jobs insert their callback at the start of the list.
        self.connection.run_on_commit.append((set(), begin, True))
        try:
            yield
        except BaseException:
            for alias, waiting in self.jobs.waiting.items():
                del waiting[jobs.get(alias, 0) :]
            self._hooks_since(begin)
            raise
        finally:
            self.may_query = False
        for sids, hook, robust in self._hooks_since(begin):
            if isinstance(hook, partial) and hook.func == self.events.append:
                hook()
            else:
                self.connection.run_on_commit.append(
                    (sids, named_callback(hook, call.hook), robust)
                )

    def _hooks_since(self, begin: object) -> list[Any]:
        """Remove the callbacks that were added since ``begin``; return them."""
        hooks, taken = self.connection.run_on_commit, list[Any]()
        while hooks and (hook := hooks.pop())[1] is not begin:
            taken.insert(0, hook)
        return taken

    def publish(self, event: NewEvent, log: type[EventLog]) -> None:
        """Keep an event until the batch is written. Raises ``InvalidEvent``, ``NotAtomic``."""
        require_log(log)
        if model_alias(log) != self.using:
            raise NotAtomic(
                f"{self.command} publishes to {log.__name__} on {model_alias(log)!r}, but runs on "
                f"{self.using!r}: the two would not be atomic. Publish from a subscription on the "
                "versions of the entity."
            )
        # A callback until the command ends: the rollback of a handler's savepoint drops it.
        new = checked(event, log)
        require_storable([new], using=self.using)
        after_commit(partial(self.events.append, (log, new)), using=self.using, robust=True)

    def write(self) -> None:
        """Write the events and the jobs into the open transaction."""
        events, self.events = self.events, []
        for log in sorted({log for log, _ in events}, key=lambda log: log._meta.db_table):
            publish_checked([event for of, event in events if of is log], log, {}, using=self.using)
        self.jobs.write()

    @contextmanager
    def without_statements(self) -> Iterator[None]:
        """Refuse statements on every connection of this thread."""
        with ExitStack() as stack:
            for connection in _usable():
                if connection.connection is None:
                    # If the handler opens it, the session's settings are refused, too: close it.
                    stack.callback(connection.close)
                stack.enter_context(connection.execute_wrapper(self._refuse))
            yield

    def _refuse(self, execute: Any, sql: Any, params: Any, many: bool, context: Any) -> Any:
        alias = context["connection"].alias
        if self.may_query and alias == self.using:
            return execute(sql, params, many, context)
        raise StatementRefused(
            f"The command {self.command} may not query a database, here {alias!r}: it may run "
            "several times before its answer is committed. Pass the data as arguments. To query "
            "the database of the entity, declare the command with @command(atomic=True)."
        )


def _usable() -> Iterator[Any]:
    for alias in connections:
        with suppress(ImproperlyConfigured):  # its driver is not installed: no handler can use it
            yield connections[alias]


#: The effects of the handler that runs in this context; None outside handlers.
running: ContextVar[HeldEffects | None] = ContextVar("outbox_app.entities.running", default=None)


def require_running() -> HeldEffects:
    """Return the effects of the handler that runs here. Raises ``InvalidCommand``."""
    if (effects := running.get()) is None:
        raise InvalidCommand(
            "Only its commands may call publish() and stage() of an entity. Elsewhere, call "
            "outbox_app.events.publish() and outbox_app.stage()."
        )
    return effects


@dataclass(slots=True)
class Handled:
    """The result of a handler, as it is stored."""

    #: The state, decoded from ``text``.
    state: Any
    text: str
    #: The values of the type's own fields that ``columns()`` derives from the state.
    columns: dict[str, Any]
    #: For each command, its response (as readers will see it) or rejection, and the JSON of it.
    answers: list[tuple[Any, str]]


def handle(
    types: TypeSpec, spec: CommandSpec, instance: Any, calls: Sequence[Call], effects: HeldEffects
) -> Handled:
    """Let a handler answer a command, or with ``batch=True`` several; then run the rules.

    Raises ``Rejected``, also if an index refused the row in an earlier attempt; ``InvalidCommand``
    for values that cannot be stored; and any error of the handler.
    """
    name, using, first = spec.full_name, effects.using, calls[0]
    what = f"The command {name}"

    def run() -> Handled:
        # Decoded for each attempt: handlers may change their arguments.
        arguments = [json.loads(call.text) for call in calls]
        running.set(effects)
        collect_in(effects.jobs)
        driver = effects.connection.connection
        try:
            args, kwargs = ([arguments], {}) if spec.batch else ([], arguments[0])
            response = spec.handler(instance, *args, **kwargs)
        finally:
            require_same(driver, effects.connection, what)
        left = _checked(name, types, instance)
        if first.refused:
            effects.may_query = True
            vars(instance).update(left[-1])
            types.require_free(instance, first.refused, using=using)
        if not spec.batch:
            return Handled(*left, [storable(name, "the response", response)])
        if not isinstance(response, list) or len(response) != len(calls):
            raise InvalidCommand(
                f"{name} must return a list with an answer for each of {len(calls)} commands; it "
                f"returned {response!r:.100}."
            )
        if len(response) == 1 and isinstance(response[0], Rejected):
            raise response[0]
        return Handled(*left, [_answer(name, each) for each in response])

    watching = watching_callbacks(what, using=using)
    if not spec.atomic:
        with watching:
            return first.run(run)
    with guarded(what, using=using), transaction.atomic(using=using), watching:
        return first.run(run)


def _answer(name: str, answer: Any) -> tuple[Any, str]:
    if isinstance(answer, Rejected):
        return stored_rejection(name, answer)
    return storable(name, "the response", answer)


def _checked(name: str, types: TypeSpec, instance: Any) -> tuple[Any, str, dict[str, Any]]:
    if instance.state is None:
        raise InvalidCommand(f"{name} left self.state unset.")
    state, text = storable(name, "self.state", instance.state)
    if not types.rules and not types.derives_columns:
        return state, text, {}
    instance.state = json.loads(text)
    for rule, holds in types.rules.items():
        if not holds(instance):
            first = (holds.__doc__ or f"The rule {rule} is broken.").strip().splitlines()[0]
            raise Rejected(first, code=rule)
    return state, text, derived_columns(name, types, instance)


def derived_columns(name: str, types: TypeSpec, instance: Any) -> dict[str, Any]:
    """Return the values of the type's own fields, by ``columns()``. Raises ``InvalidCommand``."""
    values: dict[str, Any] = {}
    for column, value in instance.columns().items():
        field: Any = types.fields.get(column)
        if field is None:
            raise InvalidCommand(
                f"{name}: columns() names {column!r}, which is not one of the type's own fields."
            )
        try:
            values[column] = field.to_python(value)
            _require_storable(name, f"columns()[{column!r}]", values[column])
            # As it will be read: JSON with lists and with names as keys, a time with a zone. Fields
            # of projects prepare values for the database, which may work only once, and what a
            # decoder makes need not be JSON.
            if type(field) in (JSONField, models.JSONField) and field.decoder is None:
                seen = json.loads(json.dumps(value, cls=field.encoder))
                values[column], text = storable(name, f"columns()[{column!r}]", seen)
                _require_own_numbers(name, column, field, text)
            elif type(field) is DateTimeField:
                at = field.get_prep_value(values[column])
                values[column] = at.astimezone(UTC) if at and is_aware(at) else at
            if values[column] is None and not field.null:
                raise ValidationError("it may not be None.")
            field.run_validators(values[column])
            if type(field) is DecimalField:
                digits = format_number(values[column], field.max_digits, field.decimal_places)
                values[column] = digits and Decimal(digits)
        except ValidationError as error:
            raise InvalidCommand(
                f"{name}: columns() gives {column!r} an invalid value, {value!r:.100}: "
                f"{' '.join(error.messages)}"
            ) from None
    return values


def _require_own_numbers(name: str, column: str, field: Any, text: str) -> None:
    """Refuse an integer of which MySQL's own type of JSON would make a float."""
    using = getattr(running.get(), "using", "")
    if not using or not has_own_json(connections[using]) or isinstance(field, JSONField):
        return

    def require(digits: str) -> None:
        if not -(2**63) <= int(digits) < 2**64:
            raise InvalidCommand(
                f"{name}: columns()[{column!r}] holds {digits:.100}, which MySQL's JSON would make "
                "a float: it has 64 bits for an integer. Declare the field with "
                "outbox_app.fields.JSONField, which holds every number."
            )

    json.loads(text, parse_int=require)


def storable(name: str, what: str, value: Any, using: str = "") -> tuple[Any, str]:
    """Return a value as readers will see it, and its JSON. Raises ``InvalidCommand``.

    ``using``: the alias of the entity. Default: that of the handler that runs here, if any.
    """
    try:
        stored, text = canonical(what, value)
    except InvalidEvent as error:
        raise InvalidCommand(f"{name}: {error}") from None
    _require_storable(name, what, text, using)
    return stored, text


def _require_storable(name: str, what: str, value: Any, using: str = "") -> None:
    using = using or getattr(running.get(), "using", "")
    if using and isinstance(value, str) and (why := unstorable(value, using=using)):
        raise InvalidCommand(f"{name}: {what} {why}")


def stored_rejection(name: str, error: Rejected, using: str = "") -> tuple[Rejection, str]:
    """Return a rejection as it is stored, and its JSON. Raises ``InvalidCommand``."""
    fields = {"code": str(error.code or ""), "text": str(error.text)}
    stored, text = storable(name, "the rejection", fields, using)
    return Rejection(**stored), text
