"""A caller's request, which is checked before any statement, and its answer.

Names and ids follow the rules of events: 1 to 255 characters of valid Unicode. Arguments are stored
as canonical JSON. Two requests are the same if their command names and their JSON are equal.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from contextvars import copy_context
from dataclasses import KW_ONLY, dataclass
from hashlib import sha256
from math import inf
from typing import Any, TypeVar

from celery.exceptions import SoftTimeLimitExceeded
from django.conf import settings
from django.db import IntegrityError, InternalError
from django.utils.timezone import activate as activate_zone
from django.utils.timezone import get_current_timezone, get_default_timezone
from django.utils.translation import activate, deactivate_all, get_language

from ..database.encoding import unstorable
from ..database.transaction_guard import LOST
from ..events.exceptions import InvalidEvent
from ..events.log.newevent import ANY, ExpectedVersion, canonical, checked_name, expected_number
from ..exceptions import OutboxError
from ..failpoints import failpoint
from ..process.endings import comes_from_outside
from .declaration import Rejected
from .exceptions import (
    CommandIdConflict,
    CommandTimeout,
    EntityContended,
    EntityError,
    InvalidCommand,
    OutcomeUnknown,
    Overloaded,
)

Result = TypeVar("Result")

#: Errors that a call may get before its command id was looked up.
UNSURE = (CommandTimeout, EntityContended, Overloaded, InternalError, *LOST)
#: The longest timeout, in seconds.
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
    #: The version of the entity after the command.
    version: int
    rejected: Rejection | None
    #: True if this is the first answer to the command id, given again. No handler ran.
    replayed: bool


def stored_answer(version: int, rejected: bool, response: Any) -> Outcome:
    """Return an answer from the columns of its version."""
    rejection = Rejection(**response) if rejected and response else None  # None: erased
    return Outcome(None if rejected else response, version, rejection, replayed=False)


def raised(outcome: Outcome) -> Outcome:
    """Return an answer, or raise ``Rejected`` if it is a rejection."""
    if outcome.rejected:
        raise Rejected(outcome.rejected.text, code=outcome.rejected.code)
    return outcome


def deadline_after(timeout: float | None, default: float) -> float:
    """Return the time when a caller gives up. Raises ``InvalidCommand`` for a bad timeout."""
    seconds = default if timeout is None else timeout
    if type(seconds) not in (int, float) or not 0 < seconds <= MAX_TIMEOUT:
        raise InvalidCommand(f"timeout must be above 0, at most {MAX_TIMEOUT}: {seconds!r}.")
    return time.monotonic() + seconds


class Call:
    """One command on its way to its answer. Raises ``InvalidCommand`` if it cannot be stored."""

    def __init__(self, asked: Command, deadline: float = inf) -> None:
        arguments = {} if asked.arguments is None else asked.arguments
        if not isinstance(arguments, Mapping):
            raise InvalidCommand(f"arguments must be a mapping by name; got {arguments!r}.")
        try:
            self.id = checked_name("id", asked.id)
            self.command = checked_name("command", asked.command)
            self.command_id = checked_name("command_id", asked.command_id)
            self.arguments, self.text = canonical("arguments", dict(arguments))
            #: The version that the entity must be at; 0: it must not exist; None: any.
            self.expected = expected_number(asked.expected_version)
        except InvalidEvent as error:
            raise InvalidCommand(str(error)) from None
        self.hash = sha256(_sorted([self.command, self.arguments]).encode()).hexdigest()
        #: The time when the caller gives up, by the monotonic clock.
        self.deadline = deadline
        #: The caller's. Django keeps language and time zone by thread, though in context variables.
        self.context, self.thread = copy_context(), threading.get_ident()
        self.language, self.zone = get_language(), get_current_timezone()
        #: Whether language and zone are those of the settings, which each thread begins with.
        self.usual = self.language == settings.LANGUAGE_CODE and self.zone is get_default_timezone()
        #: Whether an interrupted batch, or another server, may have executed it, or still may.
        self.begun = False
        #: Whether it must be handled alone: a batch handler failed with it, or ended the thread.
        self.alone = False
        #: Whether it gets a transaction of its own, after those that wait: it has undone a batch,
        #: or may have.
        self.apart = False
        #: The error with which it has undone its transaction, such as that of a lock.
        self.undone_by: BaseException | None = None
        #: Whether its answer was committed before its batch, and is given again.
        self.is_replay = False
        #: Errors of an index that refused its row. It then ends its batch, and may be rejected.
        self.refused: tuple[IntegrityError, ...] = ()
        #: Wakes the caller when the call is answered, or when the caller's thread is to lead.
        self.waits: threading.Event | asyncio.Future[None] | None = None
        #: Whether the thread that waits for it may lead.
        self.may_lead = True
        #: Whether its caller has given up, or has to end: it cannot lead.
        self.gone = False
        #: Its route, as a label of ``series.ROUTED``; empty if it was not routed.
        self.route = ""
        #: The result of the last attempt. The caller gets it as soon as that is committed.
        self.answer: Outcome | BaseException | None = None
        #: Values of its version. The response and the state after it are JSON. The state is None
        #: if there is no entity yet.
        self.version, self.type, self.rejected = 0, "", False
        self.response: str = ""
        self.state: str | None = None

    def refuse_unstorable(self, using: str) -> bool:
        """Answer with ``InvalidCommand``, and return True, if the database lacks a character."""
        for field in ("id", "command", "command_id", "text"):
            if why := unstorable(getattr(self, field), using=using):
                what = "arguments" if field == "text" else field
                self.answer = InvalidCommand(f"{what} {why}")
                return True
        return False

    def run(self, function: Callable[..., Result], *args: Any) -> Result:
        """Call a function, in this thread, in a fresh copy of the caller's context."""
        context = self.context.copy()
        if not self.usual and threading.get_ident() != self.thread:
            context.run(activate, self.language) if self.language else context.run(deactivate_all)
            context.run(activate_zone, self.zone)
        return context.run(function, *args)

    def hook(self, function: Callable[[], Any]) -> None:
        """Run an ``on_commit`` callback of the command, in its caller's context."""
        try:
            self.run(function)
        except BaseException as error:
            if isinstance(error, Exception) or ends_thread(error, [self]):
                raise
            raise OutboxError(  # Django logs it, and runs the callbacks of other callers
                f"A callback of the command {self.command!r} of {self.id!r} raised {error!r}, "
                "which ends no thread of another caller. The command is committed."
            ) from error

    @property
    def seconds_left(self) -> float:
        return self.deadline - time.monotonic()

    def result(self) -> Outcome:
        if isinstance(self.answer, Outcome):
            return self.answer
        assert self.answer is not None, "a call without an answer"
        raise self.answer

    def conflict(self, command: str, version: int) -> CommandIdConflict:
        """Return the error for a command id that another request has, with the answer's version."""
        return CommandIdConflict(
            f"The command id {self.command_id!r} of {self.id!r} belongs to another request, "
            f"{command!r} at version {version}: the command or its arguments differ. "
            "Use a new id for a new request."
        )

    def late(self, *, begun: bool) -> Exception:
        """Return the error for a caller whose time is over; ``begun``: its batch is under way."""
        self.begun |= begun
        if isinstance(self.undone_by, Exception) and not self.begun:
            return self.undone_by
        text = f"The command {self.command!r} of {self.id!r} timed out before it was begun."
        return self.error_for_caller(CommandTimeout(f"{text} Nothing was written: send it again."))

    def error_for_caller(self, error: Exception) -> Exception:
        """Return the error for the caller: ``OutcomeUnknown`` if the command may have run.

        An error from after the look-up of its command id (a handler's, say) is returned as it is.
        """
        if not self.begun or not isinstance(error, UNSURE):
            return error
        unknown = OutcomeUnknown(
            f"The command {self.command!r} of {self.id!r} was in progress when it timed out or the "
            "connection was lost. Send it again with the same command id: it is executed once."
        )
        unknown.__cause__ = None if isinstance(error, EntityError) else error
        return unknown


class Undone(Exception):
    """A command has undone its batch, by its handler, its row or a receiver of its version.

    ``call`` is that command, if it is known, and ``waited`` whether it has waited for a lock for as
    long as a transaction with others may.
    """

    def __init__(self, error: BaseException, call: Call | None, *, waited: bool = False) -> None:
        super().__init__(error)
        self.error, self.call, self.waited = error, call, waited


def deliver(calls: Sequence[Call]) -> None:
    """Wake the callers. All coroutines of a loop are woken by one call into it."""
    half = len(calls) // 2
    try:
        _wake(calls[:half])
        failpoint("entity_answered")
    finally:
        _wake(calls[half:])


def _wake(calls: Sequence[Call]) -> None:
    by_loop: dict[asyncio.AbstractEventLoop, list[asyncio.Future[None]]] = defaultdict(list)
    for call in calls:
        if isinstance(call.waits, threading.Event):
            call.waits.set()
        elif call.waits is not None:
            by_loop[call.waits.get_loop()].append(call.waits)
    for loop, futures in by_loop.items():
        with suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(_resolve, futures)


def _resolve(futures: Sequence[asyncio.Future[None]]) -> None:
    for future in futures:
        if not future.done():
            future.set_result(None)


def ends_thread(error: BaseException, calls: Sequence[Call]) -> bool:
    """Return whether what the code of these calls has raised has to end this thread.

    The main thread, which signals reach, leads its own call only.
    """
    ordinary = isinstance(error, Exception) and not isinstance(error, SoftTimeLimitExceeded)
    own = all(call.thread == threading.get_ident() for call in calls)
    return not ordinary and (own or comes_from_outside(error))
