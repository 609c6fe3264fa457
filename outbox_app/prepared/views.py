"""Views of the door: signed requests about prepared events, by senders and by keepers.

A request is checked in this order: size, key, signature on the bytes as they came, time, content,
grants. Each may come twice: it changes nothing the second time. Every answer is signed but those to
a caller who is not known (one body for all of them). Errors are problem documents (RFC 9457) in
sentences of our own. No view has a session, a cookie, or a transaction of the request.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from functools import partial, wraps
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import django.db
from django.contrib.auth.decorators import login_not_required
from django.core.exceptions import SuspiciousOperation
from django.http import HttpRequest, HttpResponse
from django.utils.encoding import escape_uri_path
from django.views.decorators.cache import cache_control, never_cache
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_http_methods

from ..aliases import outbox_alias
from ..door import messages, peers
from ..door.messages import MessageRefused
from ..exceptions import InvalidPeer, InvalidPrepared
from ..models import Fence, Peer, PreparedEvent
from ..text import get_logger
from ..transactions import without_transaction
from . import keeper, questions
from .keeper import CONFLICT, CONTRADICTION, UNKNOWN
from .request import NewPrepared, checked

logger = get_logger("outbox_app.door")

State = PreparedEvent.State
SENDER, KEEPER = Peer.Direction.SENDER, Peer.Direction.KEEPER
DECIDED = (State.CONFIRMED, State.CANCELLED)
#: Of one answer: no client reads more than 64 KiB.
OPEN, OPEN_BYTES = 100, 48 * 1024

#: What is said of an event where there is no state to tell.
STATELESS = {
    CONFLICT: (409, "The id belongs to an event of other content."),
    UNKNOWN: (404, "There is no such event."),
}

#: Status and content of an answer; of a problem what it adds to its status.
Said = tuple[int, Any]
View = Callable[..., Said]


def door(method: str, direction: str, *types: str) -> Callable[[View], Callable[..., HttpResponse]]:
    """Serve a view to peers of a direction that sign, and send one of these content types."""

    def wrap(view: View) -> Callable[..., HttpResponse]:
        @wraps(view)
        def served(request: HttpRequest, **kwargs: Any) -> HttpResponse:
            try:
                return _answered(request, partial(view, **kwargs), direction, types)
            except (InvalidPeer, django.db.Error) as error:
                logger.error("The door is closed error=%r", error)
                return _response(503, {"detail": "The log says why."})

        guarded = csrf_exempt(never_cache(require_http_methods([method])(served)))
        return without_transaction(login_not_required(cache_control(no_transform=True)(guarded)))

    return wrap


def _answered(
    request: HttpRequest, view: View, direction: str, types: Sequence[str]
) -> HttpResponse:
    try:
        from ..door import signing
    except InvalidPeer as error:  # the extra is missing
        return _response(503, {"detail": str(error)})
    body = request.read(peers.LIMITS["bytes"] + 1)
    if len(body) > peers.LIMITS["bytes"]:
        return _response(413, {})
    try:
        query = request.META.get("QUERY_STRING", "")
        url = f"{request.scheme}://{request.get_host()}{escape_uri_path(request.path)}"
        url = f"{url}?{query}" if query else url
        message = SimpleNamespace(method=request.method, url=url, headers=request.headers)
        peer = signing.verify(message, body, lambda id: peers.peer_of_key(id, direction))
    except (signing.NotBelieved, SuspiciousOperation) as error:
        logger.warning("Not believed path=%s reason=%s", request.path, error)
        response = _response(401, {})
        response.headers["WWW-Authenticate"] = "Signature"
        return response
    try:
        status, said = view(request, peer, _content(request, body, peer, types))
    except MessageRefused as error:
        status, said = error.status, {"detail": str(error)}
    except django.db.Error as error:
        logger.warning("The database is away peer=%s error=%r", peer.name, error)
        status, said = 503, {}
    response = _response(status, said)
    answer = SimpleNamespace(status_code=status, headers=response.headers, request=message)
    signing.sign(answer, response.content, peers.signing_key(peer))
    return response


def _content(request: HttpRequest, body: bytes, peer: Peer, types: Sequence[str]) -> Any:
    if len(body) > peers.limit(peer, "bytes"):
        raise MessageRefused(413, "The request is larger than its sender may send.")
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise MessageRefused(415, "The body is compressed.")
    if messages.media_type(request.headers.get("Content-Type", "")) not in types:
        raise MessageRefused(415, f"The content type is {' or '.join(types)}.")
    return messages.parsed(body) if body else None


def _response(status: int, said: Any) -> HttpResponse:
    type = messages.JSON
    if status >= 400:
        type, title = messages.PROBLEM, HTTPStatus(status).phrase
        said = {"type": "about:blank", "title": title, "status": status} | said
    return HttpResponse(messages.written(said), status=status, content_type=type)


@door("POST", SENDER, messages.EVENT, messages.EVENTS)
def prepare(request: HttpRequest, peer: Peer, content: Any) -> Said:
    """Record an event, or up to 500: those that are refused keep none of the others away."""
    batch = messages.media_type(request.headers["Content-Type"]) == messages.EVENTS
    using = outbox_alias()
    #: By their place among the events: what is refused, and what is asked for.
    refused: dict[int, Said] = {}
    requests: dict[UUID, PreparedEvent] = {}
    events = messages.objects(content if batch else [content], peers.limit(peer, "events"))
    for place, event in enumerate(events):
        try:
            new = _request(peer, event, using)
            if new.event_id in requests:
                raise MessageRefused(422, "An id is there twice.")
            requests[new.event_id] = new
        except MessageRefused as error:
            if not batch:
                raise
            refused[place] = error.status, {}
    rows = PreparedEvent.objects.using(using).filter(sender=peer.name, event_id__in=list(requests))
    known = set(rows.values_list("event_id", flat=True))
    answers = iter(keeper.prepare(peer.name, list(requests.values()), using=using))
    found = [
        refused.get(n) or _said(next(answers), State.PREPARED, known) for n in range(len(events))
    ]
    return (200, [_short(*each) for each in found]) if batch else found[0]


def _request(peer: Peer, event: Any, using: str) -> PreparedEvent:
    new = NewPrepared(**messages.prepared_fields(event))
    if not peers.is_granted(peer, type=new.type, topic=new.topic, job=new.job):
        raise MessageRefused(403, "The sender may not prepare this type, topic or job.")
    try:
        return checked(new, using=using)
    except InvalidPrepared as error:
        logger.warning("Refused peer=%s event=%s reason=%s", peer.name, new.event_id, error)
        raise MessageRefused(
            422, "The event could not be published. The log of the keeper says why."
        ) from error


def _said(answer: keeper.Answer, wanted: str, known: Container[UUID] | None = None) -> Said:
    """Say what has become of an event; 201 of one that was not among those that were known."""
    id, state, _ = answer
    if state == wanted:
        created = known is not None and id not in known
        return 201 if created else 200, {"id": str(id), "state": state}
    if state in STATELESS:
        status, detail = STATELESS[state]
        return status, {"detail": detail, "id": str(id)}
    if state == CONTRADICTION:
        state = next(each for each in DECIDED if each != wanted)
    detail = "It is decided." if wanted == State.PREPARED else "It is not decided so."
    return 409, {"detail": detail, "id": str(id), "state": state}


def _short(status: int, said: dict[str, Any]) -> dict[str, Any]:
    """Return what a batch says of one element: 64 KiB have room for 500."""
    return {"status": status} | {name: said[name] for name in ("id", "state") if name in said}


@door("POST", SENDER, messages.JSON)
def decide_one(request: HttpRequest, peer: Peer, content: Any, *, id: UUID, state: str) -> Said:
    """Confirm, or cancel, an event."""
    if content is not None:
        raise MessageRefused(400, "The request has no body.")
    return _decided(peer, {id: state})[0]


@door("POST", SENDER, messages.JSON)
def decide(request: HttpRequest, peer: Peer, content: Any) -> Said:
    """Confirm and cancel up to 500 events."""
    wanted: dict[UUID, str] = {}
    for each in messages.objects(content, peers.limit(peer, "events")):
        element = messages.fields(each, ("id", "state"))
        if element["state"] not in DECIDED:
            raise MessageRefused(422, "The state is confirmed or cancelled.")
        id = messages.event_id(element["id"])
        if id in wanted:
            raise MessageRefused(422, "An id is there twice.")
        wanted[id] = element["state"]
    return 200, [_short(*each) for each in _decided(peer, wanted)]


def _decided(peer: Peer, wanted: dict[UUID, str]) -> list[Said]:
    answers = keeper.decide(peer.name, wanted, by=keeper.CALL, using=outbox_alias())
    return [_said(answer, wanted[answer.event_id]) for answer in answers]


@door("GET", SENDER, messages.JSON)
def show(request: HttpRequest, peer: Peer, content: Any, *, id: UUID) -> Said:
    """Say what became of an event of the caller."""
    row = PreparedEvent.objects.using(outbox_alias()).filter(sender=peer.name, event_id=id).first()
    if row is None:
        return 404, {"detail": STATELESS[UNKNOWN][1]}
    return 200, _described(row) | {"decide_by": row.decide_by.isoformat()}


@door("GET", SENDER, messages.JSON)
def open_events(request: HttpRequest, peer: Peer, content: Any) -> Said:
    """Say which events of the caller are open, the longest due first, after ``?skip=`` of them."""
    rows = PreparedEvent.objects.using(outbox_alias()).filter(sender=peer.name).open()
    try:
        skip = min(int(request.GET.get("skip", 0)), 1_000_000)
    except ValueError:
        raise MessageRefused(400, "skip is a number.") from None
    found: list[dict[str, Any]] = []
    left = OPEN_BYTES
    for row in rows.order_by("next_check_at", "id")[max(skip, 0) :][:OPEN]:
        found.append(_described(row))
        left -= len(messages.written(found[-1]))
        if left < 0:
            break
    return 200, found


def _described(row: PreparedEvent) -> dict[str, Any]:
    said = {"id": str(row.event_id), "prepared_at": row.prepared_at.isoformat()}
    return said | {"state": row.state, "type": row.type, "stream": row.stream}


@door("POST", KEEPER, messages.JSON)
def check(request: HttpRequest, peer: Peer, content: Any) -> Said:
    """Answer a keeper what became of the transactions of events that it keeps."""
    asked = []
    for each in messages.objects(content, peers.limit(peer, "events")):
        element = messages.fields(each, ("id", "prepared_at"), ("stream", "type"))
        names = (str(element.get(name, "")) for name in ("stream", "type"))
        try:
            at = peers.moment(element["prepared_at"])
        except ValueError as error:
            detail = "A time has the form of ISO 8601, with a time zone."
            raise MessageRefused(422, detail) from error
        asked.append(questions.Question(messages.event_id(element["id"]), at, *names))
    fences = Fence.objects.using(peer.database).filter(pk__in=[each.event_id for each in asked])
    committed = fences.filter(outcome=Fence.Outcome.COMMITTED)
    others = set(committed.exclude(keeper=peer.name).values_list("pk", flat=True))
    asked = [each for each in asked if each.event_id not in others]
    answers = questions.answers(asked, using=peer.database)
    return 200, [{"id": str(id), "outcome": outcome} for id, outcome in answers.items()]
