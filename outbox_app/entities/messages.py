"""Commands and their answers, as requests between services have them.

A request has one command (its names in the path, its key and version in headers, its arguments as
the body), or a list of commands of one type. A command of a list has the same answer as it would
have alone, with its ``status``; ``null`` stands for an answer for which the list has no room.
Servers of one service forward their callers' commands as lists, too: such a command has its whole
command id as its key, and its caller's language and time zone.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from django.utils import timezone, translation

from ..door.messages import MessageRefused, fields, written
from ..door.peers import LIMITS
from ..events.exceptions import VersionConflict
from ..events.log.newevent import ANY, NO_STREAM
from ..exceptions import OutboxError
from .exceptions import (
    AnswerArchived,
    AnswerGone,
    CommandIdConflict,
    CommandTimeout,
    DamagedEntity,
    EntityContended,
    InvalidCommand,
    OutcomeUnknown,
    Overloaded,
    UnknownEntity,
)
from .request import Call, Command, Outcome, Rejection

#: Visible ASCII without a comma, which would join repeated headers. The peer's name and this key
#: are the command id.
KEY = re.compile(r"[!-+\--~]{1,174}")
#: Errors by the ``code`` of their problem document, with their status.
PROBLEMS: dict[str, tuple[int, type[OutboxError]]] = {
    "invalid_command": (422, InvalidCommand),
    "unknown_entity": (404, UnknownEntity),
    "command_id_conflict": (422, CommandIdConflict),
    "answer_archived": (410, AnswerArchived),
    "answer_gone": (410, AnswerGone),
    "version_conflict": (412, VersionConflict),
    "contended": (409, EntityContended),
    "timeout": (503, CommandTimeout),
    "overloaded": (503, Overloaded),
    "damaged": (500, DamagedEntity),
    "outcome_unknown": (504, OutcomeUnknown),
}
#: The fields of a command in a list, and those that a server adds that forwards it.
REQUIRED, OPTIONAL = ("id", "command", "key"), ("arguments", "expected_version")
CALLERS = ("language", "zone")


def checked_key(key: Any) -> str:
    """Return an idempotency key; refuse anything else."""
    if not isinstance(key, str) or not KEY.fullmatch(key):
        raise MessageRefused(
            400, "One Idempotency-Key is required: 1 to 174 visible ASCII characters, no comma."
        )
    return key


def command_object(call: Call) -> dict[str, Any]:
    """Return a command as an element of a list."""
    found: dict[str, Any] = {"id": call.id, "command": call.command, "key": call.command_id}
    if call.arguments:
        found["arguments"] = call.arguments
    if call.expected is not None:
        found["expected_version"] = call.expected
    return found


def call_of(value: Any, *, peer: str) -> Call:
    """Return an element of a peer's list as a call. Raises ``MessageRefused``, ``InvalidCommand``.

    Args:
        peer: The name of the peer, which is a part of the command id.
    """
    asked = fields(value, REQUIRED, OPTIONAL)
    return _call(asked, command_id=f"{peer}:{checked_key(asked['key'])}")


def forwarded_object(call: Call) -> dict[str, Any]:
    """Return a command as an element of a list that is forwarded."""
    return command_object(call) | {"language": call.language, "zone": str(call.zone)}


def forwarded_call(value: Any) -> Call:
    """Return an element of a list of another server of this service as a call. Raises as above."""
    asked = fields(value, (*REQUIRED, *CALLERS), OPTIONAL)
    try:
        with translation.override(asked["language"]), timezone.override(asked["zone"]):
            return _call(asked, command_id=asked["key"])
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise MessageRefused(422, "There is no such language, or no such time zone.") from error


def _call(asked: dict[str, Any], *, command_id: Any) -> Call:
    expected = asked.get("expected_version")
    if expected is None:
        expected = ANY
    elif type(expected) is int:  # False is equal to 0, and no version
        expected = expected or NO_STREAM
    command = Command(
        *(asked["id"], asked["command"], asked.get("arguments")),
        command_id=command_id,
        expected_version=expected,
    )
    return Call(command)


def outcome_content(outcome: Outcome) -> tuple[int, dict[str, Any]]:
    """Return the status and the content of an answer."""
    content = {"version": outcome.version, "replayed": outcome.replayed}
    if no := outcome.rejected:
        return 422, content | {"rejected": True, "code": no.code, "detail": no.text}
    return 200, content | {"response": outcome.response}


def outcome_of(content: Any) -> Outcome | None:
    """Return the answer that a content is, or None if it is none."""
    match content:
        case {"response": response, "version": int(version), "replayed": bool(replayed)}:
            return Outcome(response, version, None, replayed=replayed)
        case {"rejected": True, "code": str(code), "detail": str(text), "version": int(version)}:
            replayed = bool(content.get("replayed"))
            return Outcome(None, version, Rejection(code, text), replayed=replayed)
    return None


def problem_content(error: BaseException) -> tuple[int, dict[str, Any]] | None:
    """Return the status and the content of an error that callers are told, or None."""
    for code, (status, kind) in PROBLEMS.items():
        if isinstance(error, kind):
            content: dict[str, Any] = {"code": code, "detail": str(error)}
            if isinstance(error, VersionConflict):
                content |= {"current": error.current}
            if isinstance(error, AnswerGone):
                content |= {"version": error.version}
            return status, content
    return None


def fitting(answers: Sequence[dict[str, Any] | None]) -> list[dict[str, Any] | None]:
    """Return answers as one list; None in place of those for which it has no room."""
    if len(written(answers)) <= LIMITS["bytes"]:
        return list(answers)
    room, found = LIMITS["bytes"] - len(b"null,") * len(answers) - len(b"[]"), []
    for answer in answers:
        fits = (size := len(written(answer))) <= room
        found.append(answer if fits else None)
        room -= size if fits else 0
    return found
