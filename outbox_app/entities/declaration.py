"""``@command``: what callers may ask of an entity, and how an answer that says no is given.

A command is a method. It is looked up by its name, its arguments are checked against its signature,
and it changes ``self.state`` and nothing else: it may run several times before its answer is
committed, so it must not write elsewhere, and takes the time from ``self.now``.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..eventlog.newevent import checked_name
from ..exceptions import InvalidCommand

Handler = TypeVar("Handler", bound=Callable[..., Any])
_MARK = "outbox_command"
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
    event: str
    atomic: bool

    def check(self, arguments: dict[str, Any]) -> None:
        """Refuse arguments that do not fit the handler's signature.

        Raises:
            InvalidCommand: Some are missing, or too many.
        """
        try:
            inspect.signature(self.handler).bind(None, **arguments)
        except TypeError as error:
            raise InvalidCommand(
                f"The command {self.name!r} has another signature: {error}."
            ) from None


def command(
    *, creates: bool = False, event: str = "", atomic: bool = False
) -> Callable[[Handler], Handler]:
    """Declare a method of an entity as a command.

    Args:
        creates: It may be executed on an entity that does not exist, and on no other. Its
            ``self.state`` is None until it sets it.
        event: The type of its event. Default: ``<type>.<command>``, as in ``account.withdraw``.
        atomic: It may query the entity's database, and no other, inside a savepoint of its own; the
            entity is locked before. All others may touch no database.

    Raises:
        TypeError: The method is a coroutine or a generator.
        InvalidEvent: ``event`` can be the type of no event.
    """
    checked_name("event", f"{event}{REJECTED}")

    def declare(handler: Handler) -> Handler:
        kinds = (
            inspect.iscoroutinefunction,
            inspect.isasyncgenfunction,
            inspect.isgeneratorfunction,
        )
        if any(is_kind(handler) for is_kind in kinds):
            raise TypeError(f"The command {handler.__name__!r} must be a plain method.")
        spec = CommandSpec(handler.__name__, handler, creates, event, atomic)
        setattr(handler, _MARK, spec)
        return handler

    return declare


def commands_of(entity: type) -> dict[str, CommandSpec]:
    """Return the commands that a class declares or inherits, by name."""
    methods = {name: getattr(entity, name, None) for name in dir(entity)}
    found = {name: (getattr(method, _MARK, None), method) for name, method in methods.items()}
    # A decorator above ``@command`` copies its mark: what the class holds is what runs.
    return {
        name: replace(spec, name=name, handler=method)
        for name, (spec, method) in found.items()
        if spec is not None and callable(method)
    }
