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
from dataclasses import KW_ONLY, dataclass
from hashlib import sha256
from math import inf
from typing import Any, TypeVar

from django.conf import settings
from django.db import IntegrityError, InternalError
from django.utils.timezone import activate as activate_zone
from django.utils.timezone import get_current_timezone, get_default_timezone
from django.utils.translation import activate, deactivate_all, get_language

from .. import exceptions as errors
from ..eventlog.newevent import ANY, ExpectedVersion, canonical, checked_name, expected_number
from ..process.enclosure import LOST
from .declaration import Rejected

Result = TypeVar("Result")

#: Errors of a call for which no version with its command id may have been looked for.
UNSURE = (errors.CommandTimeout, errors.EntityContended, errors.Overloaded, InternalError, *LOST)
#: Seconds for which a call may wait.
MAX_TIMEOUT = 1_000_000
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


def deadline_after(timeout: float | None, default: float) -> float:
    """Return when a caller gives up. Raises ``InvalidCommand`` for what is no time-out."""
    seconds = default if timeout is None else timeout
    if type(seconds) not in (int, float) or not 0 < seconds <= MAX_TIMEOUT:
        raise errors.InvalidCommand(f"timeout must be above 0, at most {MAX_TIMEOUT}: {seconds!r}.")
    return time.monotonic() + seconds


class Call:
    """One command on its way to its answer. Raises ``InvalidCommand`` for what none could store."""

    def __init__(self, asked: Command, deadline: float = inf) -> None:
        arguments = {} if asked.arguments is None else asked.arguments
        if not isinstance(arguments, Mapping):
            raise errors.InvalidCommand(f"arguments must be a mapping by name; got {arguments!r}.")
        try:
            self.id = checked_name("id", asked.id)
            self.command = checked_name("command", asked.command)
            self.command_id = checked_name("command_id", asked.command_id)
            self.arguments, self.text = canonical("arguments", dict(arguments))
            #: The version that the entity must be at; 0: it must not exist; None: any.
            self.expected = expected_number(asked.expected_version)
        except errors.InvalidEvent as error:
            raise errors.InvalidCommand(str(error)) from None
        self.hash = sha256(_sorted([self.command, self.arguments]).encode()).hexdigest()
        #: By the monotonic clock, in seconds.
        self.deadline = deadline
        #: Of the caller. Django keeps the latter two for each thread, though in context variables.
        self.context, self.thread = copy_context(), threading.get_ident()
        self.language, self.zone = get_language(), get_current_timezone()
        #: Whether another thread would have the same ones: those of the settings.
        self.usual = self.language == settings.LANGUAGE_CODE and self.zone is get_default_timezone()
        #: A batch that was broken off, or another server, may have executed it, or may yet.
        self.begun = False
        #: No batch handler answers it with others: it could not, or has ended its thread.
        self.alone = False
        #: With what an index has refused its row: it ends its batch, and is rejected if that stays.
        self.refused: tuple[IntegrityError, ...] = ()
        #: What wakes the thread, or the coroutine, when it is answered or the thread is to lead.
        self.waits: threading.Event | asyncio.Future[None] | None = None
        #: Whether the thread that waits for it may lead.
        self.lends = True
        #: Whether its caller has given up, or has to end.
        self.gone = False
        #: How it came to where it is executed, as ``counters.ROUTED`` tells it; empty: directly.
        self.route = ""
        #: What the last attempt made of it; the caller's as soon as that is committed.
        self.answer: Outcome | BaseException | None = None
        #: Of the version that is written of it. The response, and the state after it (None: there
        #: is no entity yet), are JSON.
        self.version, self.type, self.rejected = 0, "", False
        self.response: str = ""
        self.state: str | None = None

    def run(self, function: Callable[..., Result], *args: Any) -> Result:
        """Call a function, in this thread, in a fresh copy of the caller's context."""
        context = self.context.copy()
        if not self.usual and threading.get_ident() != self.thread:
            context.run(activate, self.language) if self.language else context.run(deactivate_all)
            context.run(activate_zone, self.zone)
        return context.run(function, *args)

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def result(self) -> Outcome:
        if isinstance(self.answer, Outcome):
            return self.answer
        assert self.answer is not None, "a call without an answer"
        raise self.answer

    def late(self, *, begun: bool) -> Exception:
        """Return the error of a caller whose time is over, while its batch is under way or not."""
        self.begun |= begun
        text = f"The command {self.command!r} of {self.id!r} was not begun in its time."
        return self.told(errors.CommandTimeout(f"{text} Nothing was written: send it again."))

    def told(self, error: Exception) -> Exception:
        """Return what the caller is told of an error: not that nothing was written, if it may be.

        What a look at its command id has come before (a handler's error, say) is told as it is.
        """
        if not self.begun or not isinstance(error, UNSURE):
            return error
        unknown = errors.OutcomeUnknown(
            f"The command {self.command!r} of {self.id!r} was under way when its time was over, or "
            "the connection. Send it again with the same command id: it is executed once."
        )
        unknown.__cause__ = None if isinstance(error, errors.EntityError) else error
        return unknown
