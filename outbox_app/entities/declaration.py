"""``@command`` and ``@rule``: what callers may ask of an entity, and what must hold afterwards.

A command is a method. It is looked up by its name, its arguments are checked against its signature,
and it changes ``self.state`` and nothing else: it may run several times before its answer is
committed, so it must not write elsewhere, and takes the time from ``self.now``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, TypeVar

from django.core.exceptions import ValidationError
from django.db import IntegrityError, ProgrammingError, connections
from django.db.models import CheckConstraint, Field, UniqueConstraint

from ..events.log.newevent import checked_name
from .exceptions import InvalidCommand
from .models import EntityRow

Handler = TypeVar("Handler", bound=Callable[..., Any])
_MARK, _RULE = "outbox_command", "outbox_rule"
#: The suffix of the event type of a rejection.
REJECTED = ".rejected"
#: The names of the fields that every entity type inherits.
BASE = {field.name for field in EntityRow._meta.concrete_fields}


class Rejected(Exception):
    """Raised by a command to reject it. The rejection is recorded, and replayed for its id.

    Args:
        text: The reason, for people.
        code: The reason, for programs; at most 100 characters. Default: none.
    """

    def __init__(self, text: str, *, code: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.code = code


def command(
    *, creates: bool = False, event: str = "", atomic: bool = False, batch: bool = False
) -> Callable[[Handler], Handler]:
    """Declare a method of an entity as a command.

    Args:
        creates: The command creates the entity, and is rejected if the entity exists. Its
            ``self.state`` is None until it sets it.
        event: The type of its event. Default: ``<type>.<command>``, as in ``account.withdraw``.
        atomic: The command may query the entity's database, but no other, inside a savepoint of its
            own; the entity is locked first, and stays locked while a query waits for another lock:
            prefer ``nowait``. Other commands may not touch a database.
        batch: The method gets a list with the arguments of successive commands. It returns a list
            with an answer, or a ``Rejected``, for each, and must answer as it would one by one. If
            it raises, or breaks a rule, it is called again for each command alone. Only for types
            with ``states = "last"``.

    Raises:
        TypeError: The method is a coroutine or a generator; or both ``batch`` and ``atomic`` or
            ``creates`` are given.
        InvalidEvent: ``event`` is not a valid event type.
    """
    for name in (event, f"{event}{REJECTED}"):
        checked_name("event", name, empty=True)
    if batch and (atomic or creates):
        raise TypeError("A command with batch=True takes neither atomic=True nor creates=True.")

    def declare(handler: Handler) -> Handler:
        _require_plain("command", handler)
        flags = {"creates": creates, "event": event, "atomic": atomic, "batch": batch}
        setattr(handler, _MARK, flags)
        return handler

    return declare


def rule(method: Handler) -> Handler:
    """Declare a method of an entity as a rule, which must hold after each command.

    It reads ``self.state``. If it returns a false value, the command is rejected: the code is the
    rule's name, and the text is the first line of its docstring. It may also raise ``Rejected``.
    Raises ``TypeError`` for a coroutine or a generator: its result would always be true.
    """
    _require_plain("rule", method)
    setattr(method, _RULE, True)
    return method


def _require_plain(what: str, method: Any) -> None:
    kinds = inspect.iscoroutinefunction, inspect.isgeneratorfunction, inspect.isasyncgenfunction
    if any(is_kind(method) for is_kind in kinds):
        raise TypeError(f"The {what} {method.__name__!r} must be a plain method.")


class CommandSpec:
    """A command as a type declares or inherits it."""

    def __init__(self, entity: Any, name: str, handler: Callable[..., Any]) -> None:
        flags = getattr(handler, _MARK)
        self.name, self.handler = name, handler
        self.creates, self.atomic, self.batch = flags["creates"], flags["atomic"], flags["batch"]
        #: The name in error messages.
        self.full_name = f"{entity.__name__}.{name}"
        #: The type of the command's event.
        self.event = flags["event"] or f"{entity._meta.model_name}.{name}"
        self.signature = inspect.signature(handler)
        parameters = list(self.signature.parameters.values())[1:]
        plain = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        #: The arguments that a call must and may have; with ``**kwargs`` the signature decides.
        self.required = {p.name for p in plain if p.default is p.empty}
        self.allowed = {p.name for p in plain} if plain == parameters else set()

    def check(self, arguments: dict[str, Any]) -> None:
        """Raise ``InvalidCommand`` for arguments that do not fit the handler's signature."""
        if self.batch or self.required <= arguments.keys() <= self.allowed:
            return
        try:
            self.signature.bind(None, **arguments)
        except TypeError as error:
            takes = inspect.Signature(list(self.signature.parameters.values())[1:])
            raise InvalidCommand(f"The command {self.name!r} takes {takes}: {error}.") from None


class TypeSpec:
    """What an entity type declares or inherits."""

    def __init__(self, entity: Any) -> None:
        self.entity = entity
        methods = {n: m for n in dir(entity) if callable(m := getattr(entity, n, None))}
        # A decorator above ``@command`` copies the mark, so the decorated method is the handler.
        marked = {name: method for name, method in methods.items() if hasattr(method, _MARK)}
        self.commands = {name: CommandSpec(entity, name, each) for name, each in marked.items()}
        self.rules = {name: method for name, method in methods.items() if hasattr(method, _RULE)}
        own = [field for field in entity._meta.concrete_fields if field.name not in BASE]
        #: The fields that the project has added, except generated ones.
        self.fields: dict[str, Field[Any, Any]] = {f.attname: f for f in own if not f.generated}
        self.derives_columns = entity.columns is not EntityRow.columns
        unique = [(field.name,) for field in own if field.unique]
        unique += entity._meta.unique_together
        #: The constraints that may refuse a row; those of unique fields are named after them.
        self.constraints = [
            *(c for c in entity._meta.constraints if not isinstance(c, CheckConstraint)),
            *(UniqueConstraint(fields=names, name="_".join(names)) for names in unique),
        ]
        #: The columns, and "state", whose change an index may refuse.
        self.unique = {name for each in self.constraints for name in self._about(each)}

    def _about(self, constraint: Any) -> set[str]:
        names = {*(getattr(constraint, "fields", None) or ())}
        parts = [*getattr(constraint, "expressions", ()), getattr(constraint, "condition", None)]
        # A constraint with a condition or expressions, or an exclusion, may involve any field.
        any_of_them = any(parts) or not names
        fields = [field for field in self.entity._meta.concrete_fields if field.name in names]
        parts += [field.expression for field in fields if field.generated]
        names |= {ref[0] for part in parts for ref in self.entity._get_expr_references(part)}
        own = {name for name, field in self.fields.items() if any_of_them or field.name in names}
        return own | names & {"state"}

    def require_free(self, instance: Any, refused: Sequence[IntegrityError], *, using: str) -> None:
        """Raise ``Rejected`` for the constraint, or unique field, that refuses a row.

        If none is found, the conflicting row may be gone by now: the caller writes its row again.
        """

        def rejected(constraint: Any) -> Rejected:
            if constraint in self.entity._meta.constraints:
                text = str(constraint.get_violation_error_message())
            else:
                [text] = instance.unique_error_message(self.entity, constraint.fields).messages
            return Rejected(text, code=constraint.name)

        for constraint in self.constraints:
            try:
                constraint.validate(self.entity, instance, using=using)
            except ValidationError:
                raise rejected(constraint) from None
            except ProgrammingError:  # on MySQL ->> takes a column, and Django gives it a value
                if connections[using].vendor != "mysql":
                    raise
        if len(refused) > 1:
            # The caller's snapshot may hide the other row. The error's text ends with the index.
            text = str(refused[-1]).partition("\nDETAIL")[0].rpartition(" for key ")[2]
            named = [each for each in self.constraints if each.name in text]
            named.sort(key=lambda each: (text.rfind(each.name) + len(each.name), len(each.name)))
            raise rejected(named[-1]) if named else refused[-1]


spec_of = cache(TypeSpec)
