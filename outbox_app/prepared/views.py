"""Views of the door: signed requests about prepared events, by senders and by keepers.

A request may be repeated: the second one changes nothing. ``door.serving`` says what is checked.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from django.http import HttpRequest

from ..aliases import outbox_alias
from ..database.clock import DatabaseNow, stored
from ..door import messages, peers
from ..door.messages import MessageRefused
from ..door.peers import KEEPER, SENDER, Peer
from ..door.serving import Reply, door, seconds_left
from ..jobs.staging.insert import chunks
from ..text import get_logger
from . import keeper
from .exceptions import InvalidPrepared
from .fences import Question, outcomes
from .models import PreparedEvent
from .request import MOST_SKIPPED, NewPrepared, checked

logger = get_logger("outbox_app.door")

State = PreparedEvent.State
DECIDED = (State.CONFIRMED, State.CANCELLED)
#: The most events, and their bytes, in one answer: no client reads more than 64 KiB.
OPEN, OPEN_BYTES = 100, 48 * 1024


@door("POST", SENDER, messages.EVENT, messages.EVENTS)
def prepare(request: HttpRequest, peer: Peer, content: Any) -> Reply:
    """Record an event, or up to 500 events. A refused event does not affect the others."""
    batch = messages.media_type(request.headers["Content-Type"]) == messages.EVENTS
    using = outbox_alias()
    #: Refusals, by the place of the event in the request; accepted events, by id.
    refused: dict[int, Reply] = {}
    requests: dict[UUID, PreparedEvent] = {}
    events = messages.objects(content if batch else [content], peers.limit(peer, "events"))
    for place, event in enumerate(events):
        try:
            new = _request(peer, event, using)
            if new.event_id in requests:
                raise MessageRefused(422, "An id occurs twice.")
            requests[new.event_id] = new
        except MessageRefused as error:
            refused[place] = error.status, {"detail": str(error)}
    answers = iter(keeper.prepare(peer.name, list(requests.values()), using=using))
    found = [refused.get(n) or _reply(next(answers), State.PREPARED) for n in range(len(events))]
    return (200, [_short(*each) for each in found]) if batch else found[0]


def _request(peer: Peer, event: Any, using: str) -> PreparedEvent:
    new = NewPrepared(**messages.prepared_fields(event))
    if not peers.is_granted(peer, type=new.type, topic=new.topic, job=new.job):
        raise MessageRefused(403, "The sender may not prepare this type, topic or job.")
    try:
        return checked(new, using=using)
    except InvalidPrepared as error:
        logger.warning(
            "Prepared event refused peer=%s event_id=%s reason=%s", peer.name, new.event_id, error
        )
        raise MessageRefused(
            422, "The event could not be published. The log of the keeper says why."
        ) from error


def _reply(answer: keeper.Answer, wanted: str) -> Reply:
    status = 201 if answer.is_new else keeper.status_of(answer.state, wanted)
    return status, {"id": str(answer.event_id), "state": answer.state}


def _short(status: int, content: dict[str, Any]) -> dict[str, Any]:
    """Return the answer about one element of a batch. 500 answers fit into 64 KiB."""
    return {"status": status} | {name: content[name] for name in ("id", "state") if name in content}


@door("POST", SENDER, messages.JSON)
def decide_one(request: HttpRequest, peer: Peer, content: Any, *, id: UUID, state: str) -> Reply:
    if content is not None:
        raise MessageRefused(400, "The request must have no body.")
    return _decided(peer, {id: state})[0]


@door("POST", SENDER, messages.JSON)
def decide(request: HttpRequest, peer: Peer, content: Any) -> Reply:
    wanted: dict[UUID, str] = {}
    for each in messages.objects(content, peers.limit(peer, "events")):
        element = messages.fields(each, ("id", "state"))
        if element["state"] not in DECIDED:
            raise MessageRefused(422, "The state must be confirmed or cancelled.")
        id = messages.event_id(element["id"])
        if id in wanted:
            raise MessageRefused(422, "An id occurs twice.")
        wanted[id] = element["state"]
    return 200, [_short(*each) for each in _decided(peer, wanted)]


def _decided(peer: Peer, wanted: dict[UUID, str]) -> list[Reply]:
    answers = keeper.decide(peer.name, wanted, by=keeper.CALL, using=outbox_alias())
    return [_reply(answer, wanted[answer.event_id]) for answer in answers]


@door("GET", SENDER, messages.JSON)
def show(request: HttpRequest, peer: Peer, content: Any, *, id: UUID) -> Reply:
    row = PreparedEvent.objects.using(outbox_alias()).filter(sender=peer.name, event_id=id).first()
    if row is None:
        return 404, {"detail": "There is no such event."}
    return 200, _described(row) | {"decide_by": messages.zoned(row.decide_by)}


@door("GET", SENDER, messages.JSON)
def open_events(request: HttpRequest, peer: Peer, content: Any) -> Reply:
    """List open events of the caller, the longest due first, after the first ``?skip=``.

    Events that are immune still are left out: their transactions may not have begun.
    """
    rows = PreparedEvent.objects.using(outbox_alias()).filter(sender=peer.name).open()
    rows = rows.exclude(asked=0, next_check_at__gt=DatabaseNow())
    try:
        skip = min(int(request.GET.get("skip", 0)), MOST_SKIPPED)
    except ValueError:
        raise MessageRefused(400, "skip must be a number.") from None
    events = map(_described, rows.order_by("next_check_at", "id")[max(skip, 0) :][:OPEN])
    parts = chunks(events, rows=OPEN, bytes=OPEN_BYTES, size=lambda row: len(messages.written(row)))
    return 200, next(parts, [])


def _described(row: PreparedEvent) -> dict[str, Any]:
    fields = {"id": str(row.event_id), "prepared_at": messages.zoned(row.prepared_at)}
    return fields | {"state": row.state, "type": row.type, "stream": row.stream}


@door("POST", KEEPER, messages.JSON)
def check(request: HttpRequest, peer: Peer, content: Any) -> Reply:
    """Tell a keeper the outcomes of the transactions of its events."""
    asked = []
    for each in messages.objects(content, peers.limit(peer, "events")):
        element = messages.fields(each, ("id", "prepared_at"), ("stream", "type"))
        names = (str(element.get(name, "")) for name in ("stream", "type"))
        try:
            at = stored(peers.moment(element["prepared_at"]))
        except (ValueError, OverflowError) as error:
            detail = "A time must be in ISO 8601, with a time zone."
            raise MessageRefused(422, detail) from error
        asked.append(Question(messages.event_id(element["id"]), at, *names))
    # Half of the caller's time: the last wait for a transaction begins within it, and ends later.
    seconds = (seconds_left(request) or 0) / 2 or None
    found = outcomes(asked, keeper=peer.name, using=peer.database, seconds=seconds)
    return 200, [{"id": str(id), "outcome": outcome} for id, outcome in found.items()]
