"""Commands for entities of another service: ``service("shop").execute(…)``, ``execute_many``.

The command id makes a repeat safe, so a call without an answer is repeated at the next server,
which finds the answer if the first server has executed the command.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from django.utils.encoding import escape_uri_path

from ..door import client
from ..door.exceptions import PeerUnavailable
from ..door.messages import written
from ..door.peers import KEEPER, LIMITS, Peer, peer_named, service_of
from ..events.exceptions import VersionConflict
from ..events.log.newevent import ANY, ExpectedVersion
from ..exceptions import OutboxError
from ..fleet.cluster import Service
from ..fleet.cluster import service as of_the_fleet
from ..jobs.staging.insert import chunks
from .exceptions import AnswerArchived, AnswerGone, EntityError, InvalidCommand, OutcomeUnknown
from .messages import KEY, PROBLEMS, command_object, outcome_of
from .request import Call, Command, Outcome, deadline_after, raised

#: The statuses with which a server refuses a command.
REFUSED = (400, 401, 404, 413, 415, 422)


class CommandService(Service):
    """A service whose servers execute commands of entities."""

    def execute(
        self,
        type: str,
        id: str,
        command: str,
        arguments: Mapping[str, Any] | None = None,
        *,
        command_id: str,
        expected_version: ExpectedVersion = ANY,
        timeout: float | None = None,
        raise_rejected: bool = False,
    ) -> Outcome:
        """Let the service execute a command of an entity, once, whichever server answers.

        Args:
            type: The type of the entity, with its app: "bank.account".
            command_id: As for ``Entity.execute``; 1 to 174 visible ASCII characters, no comma.
            timeout: Seconds for all attempts together, if less than ``DEADLINE``.

        Raises:
            EntityError: As ``Entity.execute`` raises it. ``InvalidCommand`` also if the service
                does not grant the command to this peer.
            OutcomeUnknown: No server has answered. Repeat the call with the same command id.
            PeerError: The service is not registered as a keeper, or could not be reached.
        """
        asked = Command(
            id, command, arguments, command_id=command_id, expected_version=expected_version
        )
        request = Call(asked, deadline_after(timeout, self.deadline))
        peer = peer_named(self.name, KEEPER)
        outcome = _execute(self, peer, type, request)
        return raised(outcome) if raise_rejected else outcome

    async def aexecute(self, *args: Any, **options: Any) -> Outcome:
        """As ``execute``, for a coroutine."""
        return await asyncio.to_thread(self.execute, *args, **options)

    def execute_many(
        self,
        type: str,
        commands: Iterable[Command],
        *,
        timeout: float | None = None,
        return_exceptions: bool = False,
    ) -> list[Any]:
        """Let the service execute commands of one type, in as few requests as fit, each once.

        Commands for one entity keep their order and share transactions. One that fails leaves the
        others as they are; after a request without an answer no other is sent.

        Args:
            type: The type of the entities, with its app: "bank.account".
            commands: ``Command(id, command, arguments, command_id=…)``, with command ids as for
                ``execute``. A request has at most 1,000 of them, and 4 MiB.
            timeout: Seconds for all requests together, if less than ``DEADLINE``.
            return_exceptions: Return a command's error in place of its answer. Default: the first
                error is raised, after the last request.

        Returns:
            The answers, in the order of the commands.

        Raises:
            EntityError, OutcomeUnknown, PeerError: As ``execute``. After a request without an
                answer, ``OutcomeUnknown`` for each of its commands, and ``PeerUnavailable`` for
                those that were not sent: repeat all of them with their ids, in their order.
        """
        deadline, peer = deadline_after(timeout, self.deadline), peer_named(self.name, KEEPER)
        answers: list[Any] = []
        calls: dict[int, Call] = {}
        for number, each in enumerate(commands):
            try:
                calls[number] = Call(each, deadline)
                answers.append(None)
            except InvalidCommand as error:
                answers.append(error)
        for number, answer in _execute_many(self, peer, type, calls).items():
            answers[number] = answer
        for answer in answers:
            if isinstance(answer, Exception) and not return_exceptions:
                raise answer
        return answers

    async def aexecute_many(self, *args: Any, **options: Any) -> list[Any]:
        """As ``execute_many``, for a coroutine."""
        return await asyncio.to_thread(self.execute_many, *args, **options)


def service(name: str, *, cluster: str = "", balance: str = "") -> CommandService:
    """Return a service. What is not given here is taken from the settings.

    Args:
        name: The name under which its servers register.
        cluster: ``fail_over`` or ``fail_fast``. Default: the setting ``CLUSTER``.
        balance: ``weighted_random``, ``random`` or ``round_robin``. Default: ``BALANCE``.

    Raises:
        InvalidArgument: An argument is none of these, or the name is no name of a service.
    """
    found = of_the_fleet(name, cluster=cluster, balance=balance)
    return CommandService(found.name, found.cluster, found.balance, found.deadline)


def _execute(service: Service, peer: Peer, type: str, request: Call) -> Outcome:
    """Let one of the servers of a service execute a command; return its answer."""
    path = f"{type.lower()}/{request.id}/{request.command}"
    odd = {"", ".", ".."} & set(path.split("/")) or "\n" in path or "/" in type + request.command
    if odd or not KEY.fullmatch(request.command_id):
        raise InvalidCommand(
            "Over HTTP a type and a command must not have a slash; an id must not have a line "
            "break, or a part that is empty, '.' or '..'; a command id must be 1 to 174 visible "
            f"ASCII characters without a comma. Got {path!r}, {request.command_id!r}."
        )
    headers = {"Idempotency-Key": request.command_id}
    if request.expected is not None:
        headers["If-Match"] = f'"{request.expected}"'
    try:
        answer = _send(service, peer, path, request.arguments, request.deadline, headers=headers)
    except PeerUnavailable as error:
        raise _unanswered(service.name, request, error) from error
    return _outcome(service.name, request, *answer)


def _execute_many(
    service: Service, peer: Peer, type: str, calls: Mapping[int, Call]
) -> dict[int, Any]:
    """Let the servers of a service execute commands; return their answers and errors.

    After a request without an answer no other is sent: its commands would overtake those that the
    caller has to repeat.
    """
    name, objects = service.name, {n: command_object(each) for n, each in calls.items()}
    parts = deque(
        chunks(
            calls,
            rows=LIMITS["commands"],
            bytes=LIMITS["bytes"] - 2,
            size=lambda n: len(written(objects[n])) + 1,
        )
    )
    found: dict[int, Any] = {}
    while parts:
        part = parts.popleft()
        payload, deadline = [objects[n] for n in part], calls[part[0]].deadline
        try:
            status, content = _send(service, peer, type.lower(), payload, deadline)
            if status == 413 and len(part) > 1:  # only the peer knows its limits
                half = len(part) // 2
                parts.extendleft((part[half:], part[:half]))
                continue
            if status == 200 and (not isinstance(content, list) or len(content) != len(part)):
                raise PeerUnavailable(f"The service {name!r} has not answered each command.")
        except PeerUnavailable as error:
            found = {n: _unanswered(name, calls[n], error) for n in part} | found
            break
        if status != 200:  # to the whole request
            found = {n: _answer(name, calls[n], status, content) for n in part} | found
            if isinstance(found[part[0]], OutcomeUnknown):
                break
            continue
        for n, each in zip(part, content, strict=True):
            own = each.get("status") if isinstance(each, dict) else None
            found[n] = _answer(name, calls[n], own, each)
        without_room = [n for n, each in zip(part, content, strict=True) if each is None]
        if 0 < len(without_room) < len(part):  # a repeat finds their answers
            parts.appendleft(without_room)
    not_sent = "Not sent: an earlier request of this call had no answer. Send the command again."
    return dict.fromkeys(calls, PeerUnavailable(not_sent, sent=False)) | found


def _send(
    service: Service, peer: Peer, path: str, payload: Any, deadline: float, **options: Any
) -> tuple[int, Any]:
    named = service_of(peer)
    call = replace(service, name=named).call if named else client.call
    return call(
        *(peer, "POST", f"entities/{escape_uri_path(path)}", payload),
        seconds=min(max(deadline - time.monotonic(), 0.001), service.deadline),
        most=LIMITS["bytes"],
        **options,
    )


def _unanswered(name: str, request: Call, error: PeerUnavailable) -> Exception:
    if not error.sent:
        return error
    unknown = OutcomeUnknown(
        f"The service {name!r} gave no answer to {request.command!r} of {request.id!r} ({error}). "
        "Send the command again with the same command id: it is executed once."
    )
    unknown.__cause__ = error
    return unknown


def _answer(name: str, request: Call, status: Any, content: Any) -> Outcome | Exception:
    """Return the answer to one of many commands, or its error."""
    try:
        return _outcome(name, request, status, content)
    except PeerUnavailable as error:
        return _unanswered(name, request, error)
    except OutboxError as error:
        return error


def _outcome(name: str, request: Call, status: int, content: Any) -> Outcome:
    if outcome := outcome_of(content):
        return outcome
    match content:
        case {"code": "version_conflict", "detail": str(text), "current": int(current)}:
            raise VersionConflict(text, stream=request.id, current=current)
        case {"code": "answer_archived", "detail": str(text), "version": int(version)}:
            raise AnswerArchived(text, version=version)
        case {"code": "answer_gone", "detail": str(text), "version": int(version)}:
            raise AnswerGone(text, version=version)
        case {"code": str(code), "detail": str(text)} if code in PROBLEMS:
            raise PROBLEMS[code][1](text)
        case {"code": "failed"}:
            raise EntityError(f"{request.command!r} failed at {name!r}: its log says why.")
        case {"detail": str(text)} if status in REFUSED:
            raise InvalidCommand(f"The service {name!r} refuses {request.command!r}: {text}")
    raise PeerUnavailable(f"The service {name!r} gave an unexpected answer, with status {status}.")
