"""What a caller asks, checked before any statement, and what it is answered.

Names and ids follow the rules of events: 1 to 255 characters of valid Unicode. Arguments are stored
as canonical JSON, and two requests are the same if their names and their JSON are.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from ..eventlog.newevent import ANY, canonical, checked_name, expected_number
from ..exceptions import InvalidCommand, InvalidEvent


@dataclass(frozen=True, slots=True)
class Request:
    """One command for one entity, as it is stored."""

    id: str
    command: str
    arguments: dict[str, Any]
    #: The same as JSON.
    text: str
    command_id: str
    #: The version that the entity must be at; 0: it must not exist; None: any.
    expected: int | None
    hash: str

    @classmethod
    def of(
        cls,
        id: Any,
        command: Any,
        arguments: Mapping[str, Any] | None,
        command_id: Any,
        expected: Any = ANY,
    ) -> Request:
        """Check what a caller gave.

        Raises:
            InvalidCommand: Something of it could not be stored on every database.
        """
        arguments = {} if arguments is None else arguments
        if not isinstance(arguments, Mapping):
            raise InvalidCommand(f"arguments must be a mapping by name; got {arguments!r}.")
        try:
            checked_name("id", id)
            checked_name("command", command)
            checked_name("command_id", command_id)
            stored, text = canonical("arguments", dict(arguments))
            number = expected_number(expected)
        except InvalidEvent as error:
            raise InvalidCommand(str(error)) from None
        return cls(id, command, stored, text, command_id, number, _hash(command, stored))


@dataclass(frozen=True, slots=True)
class Rejection:
    """An answer that says no."""

    code: str
    text: str


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer to a command."""

    #: What the command returned, as JSON holds it; None if it was rejected.
    response: Any
    #: Of the entity, after the command.
    version: int
    rejected: Rejection | None
    #: True: the first answer to this command id, given again. No handler ran.
    replayed: bool


def _hash(command: str, arguments: Any) -> str:
    text = json.dumps([command, arguments], sort_keys=True, ensure_ascii=False, allow_nan=False)
    return sha256(text.encode()).hexdigest()
