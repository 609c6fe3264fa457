"""Keeper and sender in two projects: they call each other over HTTP, signed both ways.

An answer that is not verified counts as none: a sender gets ``KeeperUnavailable``, and for the
check-back it is silence. The request may have arrived nevertheless. Each call may be repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any
from uuid import UUID

from ..door import signing as signing  # without the extra this fails first
from ..door.client import SECONDS
from ..door.messages import EVENTS, cloudevent, written, zoned
from ..door.peers import limit, moment, peer_named
from ..exceptions import InvalidPeer, InvalidPrepared, KeeperUnavailable, PeerError, PeerUnavailable
from ..fleet.cluster import call
from ..jobs.staging.insert import chunks
from ..models import Peer, PreparedEvent
from ..models.clock import stored
from ..transactions import open_transactions
from .keeper import CONFLICT, CONTRADICTION, UNKNOWN, Answer
from .questions import COMMITTED, IN_PROGRESS, ROLLED_BACK, TOO_OLD, Question

State = PreparedEvent.State
OUTCOMES = (COMMITTED, ROLLED_BACK, IN_PROGRESS, TOO_OLD)
#: The statuses with which the keeper refuses a bad request, also when it is repeated.
REFUSED = (400, 403, 413, 415, 422)
#: The most seconds that a call takes while it holds a transaction open.
IN_TRANSACTION = 2.0


def call_in_parts(
    peer: Peer, method: str, path: str, payload: Any = None, **options: Any
) -> tuple[int, Any]:
    """Call a peer; in halves if the payload is too large, as only the peer knows its limits."""
    status, said = call(peer, method, path, payload, **options)
    if status != 413 or not payload or len(payload) == 1:
        return status, said
    middle, answers = len(payload) // 2, []
    for half in (payload[:middle], payload[middle:]):
        status, said = call_in_parts(peer, method, path, half, **options)
        if status != 200 or not isinstance(said, list):
            return status, said
        answers += said
    return status, answers


class HttpKeeper:
    #: The log is in another project.
    using = ""

    def __init__(self, name: str, alias: str) -> None:
        self.name = name
        try:
            self.peer = peer_named(name, Peer.Direction.KEEPER)
        except InvalidPeer as error:
            raise InvalidPrepared(str(error)) from error
        if alias != self.peer.database:
            raise InvalidPrepared(
                f"The keeper {name!r} asks about fences on {self.peer.database!r}, not on "
                f"{alias!r}. For each alias register a peer with its own keys."
            )

    def prepare(self, rows: Sequence[PreparedEvent]) -> list[Answer]:
        events = [cloudevent(each, source=f"/{self.name}") for each in rows]
        return [self._prepared(*said) for said in self._said("", events, content_type=EVENTS)]

    def _prepared(self, id: UUID, status: Any, state: Any) -> Answer:
        if status in REFUSED:
            why = "may not be prepared by this service" if status == 403 else "is refused"
            raise InvalidPrepared(
                f"The event {id} {why}: the keeper {self.name!r} has answered {status}, and its "
                "log says why."
            )
        if status in (200, 201, 409) and state in State.values:
            return Answer(id, str(state))
        if status == 409:
            return Answer(id, CONFLICT)
        raise self._odd("sent an unexpected answer")

    def decide(self, wanted: Mapping[UUID, str]) -> list[Answer]:
        asked = [{"id": str(id), "state": str(state)} for id, state in wanted.items()]
        return [self._told(wanted[said[0]], *said) for said in self._said("decide", asked)]

    def _told(self, wanted: str, id: UUID, status: Any, state: Any) -> Answer:
        if status == 200 and state == wanted:
            return Answer(id, wanted)
        if status == 404:
            return Answer(id, UNKNOWN)
        if status == 409 and state in PreparedEvent.OPEN:
            return Answer(id, str(state), "the keeper could not publish it; its log says why")
        if status == 409 and state in State.values:
            detail = (
                f"The prepared event {id} is {state} at the keeper {self.name!r}, so it cannot be "
                f"{wanted}. Nothing was changed."
            )
            return Answer(id, CONTRADICTION, detail)
        raise self._odd(f"sent no answer for the event {id}")

    def open(self, skip: int = 0) -> list[Question]:
        """Return some open events of this sender, for a sender that the keeper cannot call."""
        found = self._call("GET", f"prepared/open?skip={skip}")
        try:
            return [
                Question(UUID(e["id"]), stored(moment(e["prepared_at"])), e["stream"], e["type"])
                for e in found
            ]
        except (KeyError, AttributeError, TypeError, ValueError, OverflowError) as error:
            raise self._odd("sent an unexpected answer") from error

    def _said(
        self, path: str, elements: Sequence[dict[str, Any]], **options: Any
    ) -> Iterator[tuple[UUID, Any, Any]]:
        """Send elements in as few requests as fit; yield the id, status and state of each."""
        groups = chunks(
            elements,
            rows=limit(self.peer, "events"),
            bytes=limit(self.peer, "bytes") - 2,
            size=lambda element: len(written(element)) + 1,
        )
        for group in groups:
            said = self._call("POST", f"prepared/{path}", group, **options)
            if len(said) != len(group):
                raise self._odd("sent an unexpected answer")
            for sent, each in zip(group, said, strict=True):
                status = each.get("status")
                if each.get("id") != sent["id"] and status not in REFUSED:
                    raise self._odd(f"sent no answer for the event {sent['id']}")
                yield UUID(sent["id"]), status, each.get("state")

    def _call(self, method: str, path: str, payload: Any = None, **options: Any) -> list[Any]:
        options["seconds"] = IN_TRANSACTION if open_transactions() else SECONDS
        try:
            status, said = call_in_parts(self.peer, method, path, payload, **options)
        except PeerError as error:
            raise KeeperUnavailable(str(error)) from error
        if status in REFUSED:
            raise InvalidPrepared(f"The keeper {self.name!r} refused the request ({status}).")
        listed = isinstance(said, list) and all(isinstance(each, dict) for each in said)
        if status != 200 or not listed:
            raise self._odd(f"sent no list of answers (status {status})")
        return said  # type: ignore[no-any-return]

    def _odd(self, what: str) -> KeeperUnavailable:
        return KeeperUnavailable(f"The keeper {self.name!r} {what}.")


def ask_over_http(sender: str, questions: Sequence[Question]) -> dict[UUID, str]:
    peer = peer_named(sender, Peer.Direction.SENDER)
    sent = [
        {"id": str(id), "prepared_at": zoned(at), "stream": stream, "type": type}
        for id, at, stream, type in questions
    ]
    status, said = call_in_parts(peer, "POST", "check", sent)
    if status != 200 or not isinstance(said, list):
        raise PeerUnavailable(f"The sender {sender!r} sent no list of answers (status {status}).")
    asked = {str(each.event_id): each.event_id for each in questions}
    answers: dict[UUID, str] = {}
    for each in said:
        id = asked.get(str(each.get("id"))) if isinstance(each, dict) else None
        if id is None or id in answers:
            raise PeerUnavailable(f"The sender {sender!r} sent an unexpected answer.")
        if each.get("outcome") in OUTCOMES:
            answers[id] = each["outcome"]
    return answers
