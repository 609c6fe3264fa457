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
from django.utils import timezone, translation

from ..database.transaction_guard import LOST
from ..door import messages, peers
from ..door.messages import MessageRefused
from ..door.peers import SENDER, Peer
from ..door.serving import Reply, door, seconds_left
from ..events.exceptions import VersionConflict
from ..events.log.newevent import ANY, NO_STREAM
from ..exceptions import InvalidArgument, OutboxError
from ..fleet.conf import fleet_settings
from ..text import get_logger
from .declaration import CommandSpec, spec_of
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
from .forwarding import answered_here
from .maintenance import entity_named, entity_types
from .models import EntityRow
from .request import Call, Command, Outcome

logger = get_logger("outbox_app.door")

#: Visible ASCII without a comma, which would join repeated headers. The peer's name and this key
#: are the command id.
KEY = re.compile(r"[!-+\--~]{1,174}")
VERSION = re.compile(r'"(0|[1-9][0-9]{0,18})"')

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
#: JSON schema's types for the annotations of handlers, and for the fields of answers.
SCHEMAS = {"int": "integer", "str": "string", "bool": "boolean", "float": "number"}
SCHEMAS |= {"list": "array", "dict": "object"}
OUTCOME = {"response": "Any", "version": "int", "replayed": "bool"}
PROBLEM = {"status": "int", "code": "str", "detail": "str", "current": "int", "rejected": "bool"}
PROBLEM |= {"version": "int"}


@door("POST", SENDER, messages.JSON)
def execute(
    request: HttpRequest, peer: Peer, content: Any, *, type: str, id: str, command: str
) -> Reply | tuple[int, Any, dict[str, str]]:
    """Execute a command, once for each key."""
    entity = _granted(peer, type, command)
    if not isinstance(content, dict):
        raise MessageRefused(400, "The body must be an object with the command's arguments.")
    key = request.headers.get("Idempotency-Key", "")
    if not KEY.fullmatch(key):
        raise MessageRefused(
            400, "One Idempotency-Key is required: 1 to 174 visible ASCII characters, no comma."
        )
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
    content = {"version": outcome.version, "replayed": outcome.replayed}
    headers = {"ETag": f'"{outcome.version}"'}
    if outcome.replayed:
        headers["Idempotency-Replayed"] = "true"
    if no := outcome.rejected:
        return 422, content | {"rejected": True, "code": no.code, "detail": no.text}, headers
    return 200, content | {"response": outcome.response}, headers


def _problem(error: Exception, peer: Peer, command: str) -> tuple[int, Any, dict[str, str]]:
    for code, (status, kind) in PROBLEMS.items():
        if isinstance(error, kind):
            content: dict[str, Any] = {"code": code, "detail": str(error)}
            if isinstance(error, VersionConflict):
                content |= {"current": error.current}
            if isinstance(error, AnswerGone):
                content |= {"version": error.version}
            after = math.ceil(getattr(error, "retry_after", 1))
            return status, content, {"Retry-After": str(after)} if status == 503 else {}
    logger.error("Command failed peer=%s command=%s", peer.name, command, exc_info=error)
    return 500, {"code": "failed", "detail": "The command has failed. The log says why."}, {}


@door("POST", SENDER, messages.JSON)
def routed(request: HttpRequest, peer: Peer, content: Any) -> Reply:
    """Execute commands that another server of this service passed on; pass none on again."""
    if peer.name != fleet_settings().SERVICE:
        raise MessageRefused(404, "Only servers of the same service may pass on commands.")
    body = messages.fields(content, ("type", "commands"))
    versions: dict[Any, Any] = {None: ANY, 0: NO_STREAM}
    try:
        entity: Any = apps.get_model(body["type"])  # or a proxy model
        if not issubclass(entity, EntityRow):
            raise TypeError(entity)
        calls = []
        for *asked, key, at, language, zone in body["commands"]:
            with translation.override(language), timezone.override(zone):
                command = Command(*asked, command_id=key, expected_version=versions.get(at, at))
                calls.append(Call(command))
    except (OutboxError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise MessageRefused(422, "There is no such type, or no such command.") from error
    return 200, answered_here(entity, calls, seconds_left(request) or entity.timeout)


@door("GET", SENDER, messages.JSON)
def openapi(request: HttpRequest, peer: Peer, content: Any) -> Reply:
    """Describe the commands that were granted to the caller, by OpenAPI 3.1."""
    paths = {
        f"/entities/{entity._meta.label_lower}/{{id}}/{name}": {"post": _operation(entity, spec)}
        for entity in entity_types()
        for name, spec in sorted(spec_of(entity).commands.items())
        if peers.may_execute(peer, f"{entity._meta.label_lower}.{name}")
    }
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
