"""What a caller asks, checked before any statement, and what it is answered.

Names and ids follow the rules of events: 1 to 255 characters of valid Unicode. Arguments are stored
as canonical JSON, and two requests are the same if their names and their JSON are.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Callable, Mapping
from contextvars import copy_context
from dataclasses import KW_ONLY, dataclass, field
from hashlib import sha256
from typing import Any, TypeVar

from django.conf import settings
from django.db import IntegrityError
from django.utils.timezone import activate as activate_zone
from django.utils.timezone import get_current_timezone, get_default_timezone
from django.utils.translation import activate, deactivate_all, get_language

from ..eventlog.newevent import ANY, ExpectedVersion, canonical, checked_name, expected_number
from ..exceptions import CommandTimeout, InvalidCommand, InvalidEvent, OutcomeUnknown, Overloaded
from .declaration import Rejected

Result = TypeVar("Result")

_sorted = json.JSONEncoder(sort_keys=True, ensure_ascii=False, allow_nan=False).encode


@dataclass(frozen=True, slots=True)
class Command:
    """One command of ``execute_many``; the fields are the arguments of ``execute``."""

    id: str
    command: str
    arguments: Mapping[str, Any] | None = None
    _: KW_ONLY
    command_id: str
    expected_version: ExpectedVersion = ANY


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
        """Raise ``InvalidCommand`` for what could not be stored on every database."""
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
        hash = sha256(_sorted([command, stored]).encode()).hexdigest()
        return cls(id, command, stored, text, command_id, number, hash)


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


def raised(outcome: Outcome) -> Outcome:
    """Return an answer, unless it is a rejection: raise that."""
    if outcome.rejected:
        raise Rejected(outcome.rejected.text, code=outcome.rejected.code)
    return outcome


class Caller:
    """What belongs to a caller: the context variables, and Django's language and time zone.

    Django keeps the latter two for each thread, though in context variables.
    """

    __slots__ = ("context", "language", "thread", "usual", "zone")

    def __init__(self) -> None:
        self.context, self.thread = copy_context(), threading.get_ident()
        self.language, self.zone = get_language(), get_current_timezone()
        #: Whether another thread would have the same ones: those of the settings.
        self.usual = self.language == settings.LANGUAGE_CODE and self.zone is get_default_timezone()

    def run(self, function: Callable[..., Result], *args: Any, **options: Any) -> Result:
        """Call a function, in this thread, in a fresh copy of the caller's context."""
        context = self.context.copy()
        if not self.usual and threading.get_ident() != self.thread:
            context.run(activate, self.language) if self.language else context.run(deactivate_all)
            context.run(activate_zone, self.zone)
        return context.run(function, *args, **options)


@dataclass(slots=True, eq=False)
class Call:
    """One request on its way to its answer; its caller may wait in a line."""

    request: Request
    #: By the monotonic clock, in seconds.
    deadline: float
    caller: Caller = field(default_factory=lambda: Caller())
    #: No batch handler answers it with others: one has ended its thread, or an index refuses it.
    alone: bool = False
    #: With what an index has refused its row: it ends its batch, and is rejected if that stays so.
    refused: tuple[IntegrityError, ...] = ()
    #: What wakes the thread, or the coroutine, when it is answered or the thread is to lead.
    waits: threading.Event | asyncio.Future[None] | None = None
    leads: bool = False
    #: What the last attempt made of it; the caller's as soon as that is committed.
    answer: Outcome | BaseException | None = None

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def result(self) -> Outcome:
        """Return the answer, or raise it."""
        if isinstance(self.answer, Outcome):
            return self.answer
        assert self.answer is not None, "a call without an answer"
        raise self.answer


def timed_out(call: Call) -> CommandTimeout:
    request = call.request
    return CommandTimeout(
        f"The command {request.command!r} of {request.id!r} was not begun in its time. Nothing was "
        "written: send it again."
    )


def unknown(call: Call) -> OutcomeUnknown:
    request = call.request
    return OutcomeUnknown(
        f"The command {request.command!r} of {request.id!r} was under way when its time was over. "
        "Send it again with the same command id: it is executed once."
    )


def overloaded(why: str) -> Overloaded:
    return Overloaded(f"{why} Nothing was written: send it again later.", retry_after=1)
