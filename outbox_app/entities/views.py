"""Views of the door for commands: peers execute the commands that they were granted.

A command is answered as ``Entity.execute`` answers it, in a transaction of its own. The caller's
``Idempotency-Key`` makes a repeat at any server safe. A key belongs to its peer: the command id is
``<peer>:<key>``. A command that the peer was not granted gets a 404, whether it exists or not.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

from django.apps import apps
from django.http import HttpRequest

from ..database.transaction_guard import LOST, is_lost
from ..door import messages, peers
from ..door.messages import MessageRefused
from ..door.peers import SENDER, Peer
from ..door.serving import Reply, door, seconds_left
from ..events.log.newevent import ANY, NO_STREAM
from ..exceptions import InvalidArgument
from ..fleet.conf import fleet_settings
from ..text import get_logger
from .declaration import CommandSpec, spec_of
from .exceptions import InvalidCommand
from .forwarding import answered_here
from .maintenance import entity_named, entity_types
from .messages import (
    KEY,
    REQUIRED,
    call_of,
    checked_key,
    fitting,
    forwarded_call,
    outcome_content,
    problem_content,
)
from .models import EntityRow
from .request import Call, Outcome

logger = get_logger("outbox_app.door")

VERSION = re.compile(r'"(0|[1-9][0-9]{0,18})"')

#: JSON schema's types for the annotations of handlers, and for the fields of answers.
SCHEMAS = {"int": "integer", "str": "string", "bool": "boolean", "float": "number"}
SCHEMAS |= {"list": "array", "dict": "object"}
OUTCOME = {"response": "Any", "version": "int", "replayed": "bool"}
PROBLEM = {"status": "int", "code": "str", "detail": "str", "current": "int", "rejected": "bool"}
PROBLEM |= {"version": "int"}
ELEMENT = {"id": "str", "command": "str", "key": "str", "arguments": "dict"}
ELEMENT |= {"expected_version": "int"}


@door("POST", SENDER, messages.JSON)
def execute(
    request: HttpRequest, peer: Peer, content: Any, *, type: str, id: str, command: str
) -> Reply | tuple[int, Any, dict[str, str]]:
    """Execute a command, once for each key."""
    entity = _granted(peer, type, command)
    if not isinstance(content, dict):
        raise MessageRefused(400, "The body must be an object with the command's arguments.")
    key = checked_key(request.headers.get("Idempotency-Key"))
    expected, left = _expected(request), seconds_left(request)
    try:
        outcome = entity.execute(
            *(id, command, content),
            command_id=f"{peer.name}:{key}",
            expected_version=expected,
            timeout=left and min(left, entity.timeout),
        )
    except LOST:
        raise  # the database cannot be reached
    except Exception as error:
        return _problem(error, peer, f"{type}.{command}")
    return _answer(outcome)


def _granted(peer: Peer, type: str, command: str) -> Any:
    with suppress(InvalidArgument):
        entity = entity_named(type)
        known = type == entity._meta.label_lower and command in spec_of(entity).commands
        if known and peers.may_execute(peer, f"{type}.{command}"):
            return entity
    raise MessageRefused(404, "There is no such command for this caller.")


def _expected(request: HttpRequest) -> Any:
    header = request.headers.get("If-Match")
    if header is None:
        return ANY
    if not (found := VERSION.fullmatch(header)):
        raise MessageRefused(
            400, 'If-Match must be one version, as in "7"; "0" if the entity must not exist yet.'
        )
    return int(found[1]) or NO_STREAM


def _answer(outcome: Outcome) -> tuple[int, Any, dict[str, str]]:
    headers = {"ETag": f'"{outcome.version}"'}
    if outcome.replayed:
        headers["Idempotency-Replayed"] = "true"
    return *outcome_content(outcome), headers


def _problem(
    error: BaseException, peer: Peer, command: str
) -> tuple[int, dict[str, Any], dict[str, str]]:
    if problem := problem_content(error):
        after = math.ceil(getattr(error, "retry_after", 1))
        return *problem, {"Retry-After": str(after)} if problem[0] == 503 else {}
    logger.error("Command failed peer=%s command=%s", peer.name, command, exc_info=error)
    return 500, {"code": "failed", "detail": "The command has failed. The log says why."}, {}


@door("POST", SENDER, messages.JSON)
def execute_many(request: HttpRequest, peer: Peer, content: Any, *, type: str) -> Reply:
    """Execute commands of one type, each once for its key, and answer each by itself."""
    asked, left = messages.objects(content, peers.limit(peer, "commands")), seconds_left(request)
    entity: Any = None
    calls: dict[int, Call] = {}
    replies: list[dict[str, Any] | None] = [None] * len(asked)
    for number, value in enumerate(asked):
        try:
            call = call_of(value, peer=peer.name)
            entity = _granted(peer, type, call.command)
            calls[number] = call
        except MessageRefused as error:
            replies[number] = {"status": error.status, "detail": str(error)}
        except InvalidCommand as error:
            replies[number] = _listed(*_problem(error, peer, type))
    answers = answered_here(entity, list(calls.values()), left) if calls else []
    if answers and all(map(is_lost, answers)):
        raise answers[0]  # another server may reach the database
    for (number, call), answer in zip(calls.items(), answers, strict=True):
        if isinstance(answer, Outcome):
            replies[number] = _listed(*outcome_content(answer))
        elif is_lost(answer):
            replies[number] = {"status": 503, "detail": "The database is unavailable."}
        else:
            replies[number] = _listed(*_problem(answer, peer, f"{type}.{call.command}"))
    return 200, fitting(replies)


def _listed(status: int, content: dict[str, Any], headers: Any = None) -> dict[str, Any]:
    return {"status": status} | content


@door("POST", SENDER, messages.JSON)
def routed(request: HttpRequest, peer: Peer, content: Any, *, type: str) -> Reply:
    """Execute commands that another server of this service passed on; pass none on again.

    Only answers are told: the other server executes the other commands itself.
    """
    if peer.name != fleet_settings().SERVICE:
        raise MessageRefused(404, "Only servers of the same service may pass on commands.")
    try:
        entity: Any = apps.get_model(type)  # or a proxy model
        if not issubclass(entity, EntityRow):
            raise TypeError(entity)
        most = max(entity.batch_size, peers.LIMITS["commands"])
        calls = [forwarded_call(each) for each in messages.objects(content, most)]
    except (InvalidCommand, LookupError, TypeError, ValueError) as error:
        raise MessageRefused(422, "There is no such type, or no such command.") from error
    answers = answered_here(entity, calls, seconds_left(request), forwarded=True)
    outcomes = [isinstance(each, Outcome) and outcome_content(each) for each in answers]
    return 200, fitting([_listed(*each) if each else None for each in outcomes])


@door("GET", SENDER, messages.JSON)
def openapi(request: HttpRequest, peer: Peer, content: Any) -> Reply:
    """Describe the commands that were granted to the caller, by OpenAPI 3.1."""
    paths: dict[str, Any] = {}
    for entity in entity_types():
        of_type = f"/entities/{entity._meta.label_lower}"
        for name, spec in sorted(spec_of(entity).commands.items()):
            if peers.may_execute(peer, f"{entity._meta.label_lower}.{name}"):
                paths[of_type] = {"post": _operation_of_many(entity)}
                paths[f"{of_type}/{{id}}/{name}"] = {"post": _operation(entity, spec)}
    info = {"title": "Commands of entities", "version": "1"}
    return 200, {"openapi": "3.1.0", "info": info, "paths": paths}


def _operation(entity: Any, spec: CommandSpec) -> dict[str, Any]:
    parameters = [
        ("id", "path", True, {"type": "string", "maxLength": 255}),
        ("Idempotency-Key", "header", True, {"type": "string", "pattern": f"^{KEY.pattern}$"}),
        ("If-Match", "header", False, {"type": "string", "pattern": f"^{VERSION.pattern}$"}),
        ("Outbox-Seconds-Left", "header", False, {"type": "number", "exclusiveMinimum": 0}),
    ]
    return {
        "operationId": f"{entity._meta.label_lower}.{spec.name}",
        "description": spec.handler.__doc__ or "",
        "parameters": [
            {"name": name, "in": place, "required": required, "schema": schema}
            for name, place, required, schema in parameters
        ],
        "requestBody": {"required": True, **_json(messages.JSON, _arguments(spec))},
        "responses": {
            "200": {"description": "Executed"} | _json(messages.JSON, _object(OUTCOME, OUTCOME)),
            "default": {"description": "Rejected, or not executed"}
            | _json(messages.PROBLEM, _object(PROBLEM, ["status"])),
        },
    }


def _operation_of_many(entity: Any) -> dict[str, Any]:
    asked = _object(ELEMENT, REQUIRED) | {"additionalProperties": False}
    asked["properties"]["key"]["pattern"] = f"^{KEY.pattern}$"
    answered = {
        "oneOf": [_object({"status": "int"} | OUTCOME, OUTCOME), _object(PROBLEM, ["status"])]
    }
    return {
        "operationId": entity._meta.label_lower,
        "description": "Many commands, each answered as it would be alone.",
        "requestBody": {"required": True, **_json(messages.JSON, _list(asked, minItems=1))},
        "responses": {
            "200": {"description": "Answered one by one"} | _json(messages.JSON, _list(answered)),
            "default": {"description": "None executed"}
            | _json(messages.PROBLEM, _object(PROBLEM, ["status"])),
        },
    }


def _list(schema: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": schema, **more}


def _arguments(spec: CommandSpec) -> dict[str, Any]:
    if spec.batch:
        return {"type": "object"}
    parameters = list(spec.signature.parameters.values())[1:]
    named = [each for each in parameters if each.kind is not each.VAR_KEYWORD]
    kinds = {each.name: getattr(each.annotation, "__name__", each.annotation) for each in named}
    return _object(kinds, spec.required) | {"additionalProperties": named != parameters}


def _object(kinds: Mapping[str, str], required: Iterable[str]) -> dict[str, Any]:
    types = {name: SCHEMAS.get(kind) for name, kind in kinds.items()}
    properties = {name: {"type": type} if type else {} for name, type in types.items()}
    return {"type": "object", "properties": properties, "required": sorted(required)}


def _json(media_type: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"content": {media_type: {"schema": schema}}}
