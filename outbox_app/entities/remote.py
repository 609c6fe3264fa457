"""Commands for entities of another service: ``service("shop").execute(…)``.

The command id makes a repeat safe, so a call without an answer is repeated at the next server,
which finds the answer if the first server has executed the command.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from django.utils.encoding import escape_uri_path

from ..door import client
from ..door.exceptions import PeerUnavailable
from ..door.peers import KEEPER, LIMITS, Peer, peer_named, service_of
from ..events.exceptions import VersionConflict
from ..events.log.newevent import ANY, ExpectedVersion
from ..fleet.cluster import Service
from ..fleet.cluster import service as of_the_fleet
from .exceptions import AnswerArchived, AnswerGone, EntityError, InvalidCommand, OutcomeUnknown
from .request import Call, Command, Outcome, Rejection, deadline_after, raised
from .views import KEY, PROBLEMS

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
    named = service_of(peer)
    call = replace(service, name=named).call if named else client.call
    try:
        status, content = call(
            peer,
            "POST",
            f"entities/{escape_uri_path(path)}",
            request.arguments,
            seconds=min(max(request.seconds_left, 0.001), service.deadline),
            headers=headers,
            most=LIMITS["bytes"],
        )
    except PeerUnavailable as error:
        if not error.sent:
            raise
        raise OutcomeUnknown(
            f"The service {service.name!r} gave no answer to {request.command!r} of "
            f"{request.id!r} ({error}). Send the command again with the same command id: it is "
            "executed once."
        ) from error
    return _outcome(service.name, request, status, content)


def _outcome(name: str, request: Call, status: int, content: Any) -> Outcome:
    match content:
        case {"response": response, "version": int(version), "replayed": bool(replayed)}:
            return Outcome(response, version, None, replayed=replayed)
        case {"rejected": True, "code": str(code), "detail": str(text), "version": int(version)}:
            replayed = bool(content.get("replayed"))
            return Outcome(None, version, Rejection(code, text), replayed=replayed)
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
