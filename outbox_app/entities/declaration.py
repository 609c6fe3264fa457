"""``@command`` and ``@rule``: what callers may ask of an entity, and what must hold afterwards.

A command is a method. It is looked up by its name, its arguments are checked against its signature,
and it changes ``self.state`` and nothing else: it may run several times before its answer is
committed, so it must not write elsewhere, and takes the time from ``self.now``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Set
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from ..eventlog.newevent import checked_name
from ..exceptions import InvalidCommand

Handler = TypeVar("Handler", bound=Callable[..., Any])
_MARK, _RULE = "outbox_command", "outbox_rule"
#: Behind the type of the event of a rejection.
REJECTED = ".rejected"


class Rejected(Exception):
    """Raised by a command to answer no. The answer is recorded, and given again for its id.

    Args:
        text: Why, for people.
        code: Why, for programs; at most 100 characters. Default: none.
    """

    def __init__(self, text: str, *, code: str = "") -> None:
        super().__init__(text)
        self.text = text
        self.code = code


@dataclass(frozen=True, slots=True)
class CommandSpec:
    """A declared command."""

    name: str
    handler: Callable[..., Any]
    creates: bool
    #: The type of its event.
    event: str
    atomic: bool
    batch: bool
    signature: inspect.Signature = field(default_factory=inspect.Signature)
    #: Names that a call must give, and may give; ``**kwargs`` are left to the signature.
    required: Set[str] = frozenset()
    allowed: Set[str] = frozenset()
    #: Its name with that of the type, for messages.
    full_name: str = ""

    def check(self, arguments: dict[str, Any]) -> None:
        """Raise ``InvalidCommand`` for arguments that do not fit the handler's signature."""
        if self.batch or self.required <= arguments.keys() <= self.allowed:
            return
        try:
            self.signature.bind(None, **arguments)
        except TypeError as error:
            names = list(self.signature.parameters.values())[1:]
            takes = inspect.Signature(names)
            raise InvalidCommand(f"The command {self.name!r} takes {takes}: {error}.") from None


def command(
    *, creates: bool = False, event: str = "", atomic: bool = False, batch: bool = False
) -> Callable[[Handler], Handler]:
    """Declare a method of an entity as a command.

    Args:
        creates: It may be executed on an entity that does not exist, and on no other. Its
            ``self.state`` is None until it sets it.
        event: The type of its event. Default: ``<type>.<command>``, as in ``account.withdraw``.
        atomic: It may query the entity's database, and no other, inside a savepoint of its own; the
            entity is locked before. All others may touch no database.
        batch: It is given a list: the arguments of each of the commands that follow one another. It
            returns a list with an answer, or a ``Rejected``, for each, and must answer as it would
            one by one. Where it raises, or breaks a rule, it is called for each alone. Only for
            types with ``states = "last"``.

    Raises:
        TypeError: The method is a coroutine or a generator; or both ``batch`` and ``atomic`` or
            ``creates`` are given.
        InvalidEvent: ``event`` can be the type of no event.
    """
    checked_name("event", f"{event}{REJECTED}")
    if batch and (atomic or creates):
        raise TypeError("A command with batch=True takes neither atomic=True nor creates=True.")

    def declare(handler: Handler) -> Handler:
        kinds = "iscoroutinefunction", "isasyncgenfunction", "isgeneratorfunction"
        if any(getattr(inspect, is_kind)(handler) for is_kind in kinds):
            raise TypeError(f"The command {handler.__name__!r} must be a plain method.")
        spec = CommandSpec(handler.__name__, handler, creates, event, atomic, batch)
        setattr(handler, _MARK, spec)
        return handler

    return declare


def rule(method: Handler) -> Handler:
    """Declare a method of an entity as a rule, which must hold after each command.

    It reads ``self.state``. Where it returns a false value, or raises ``Rejected``, the command is
    rejected: with the rule's name as its code, and the first line of the rule's docstring as text.
    """
    setattr(method, _RULE, True)
    return method


def commands_of(entity: Any) -> dict[str, CommandSpec]:
    """Return the commands that a class declares or inherits, by name."""
    # A decorator above ``@command`` copies its mark: what the class holds is what runs.
    found: dict[str, CommandSpec] = {}
    for name, (method, spec) in _marked(entity, _MARK).items():
        signature = inspect.signature(method)
        parameters = list(signature.parameters.values())[1:]
        plain = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        found[name] = replace(
            spec,
            name=name,
            handler=method,
            event=spec.event or f"{entity._meta.model_name}.{name}",
            full_name=f"{entity.__name__}.{name}",
            signature=signature,
            required=frozenset(p.name for p in plain if p.default is p.empty),
            allowed=frozenset(p.name for p in plain) if plain == parameters else frozenset(),
        )
    return found


def rules_of(entity: type) -> dict[str, Callable[..., Any]]:
    """Return the rules that a class declares or inherits, by name."""
    return {name: method for name, (method, _) in _marked(entity, _RULE).items()}


def _marked(entity: type, mark: str) -> dict[str, tuple[Any, Any]]:
    methods = {name: getattr(entity, name, None) for name in dir(entity)}
    found = {name: (method, getattr(method, mark, None)) for name, method in methods.items()}
    return {name: (m, value) for name, (m, value) in found.items() if value and callable(m)}
