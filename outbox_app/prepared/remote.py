"""Keeper and sender in two projects: they call each other over HTTP, signed both ways.

An answer that is not verified counts as none: a sender gets ``KeeperUnavailable``, and for the
check-back it is silence. The request may have arrived nevertheless. Each call may be repeated.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any
from uuid import UUID

from ..database.clock import stored
from ..database.transactions import open_transactions
from ..door import signing as signing  # without the extra this fails first
from ..door.client import SECONDS
from ..door.exceptions import InvalidPeer, PeerError, PeerUnavailable
from ..door.messages import EVENTS, cloudevent, written, zoned
from ..door.peers import KEEPER, SENDER, Peer, limit, moment, peer_named
from ..fleet.cluster import call
from ..jobs.staging.insert import chunks
from .exceptions import InvalidPrepared, KeeperUnavailable
from .fences import COMMITTED, IN_PROGRESS, ROLLED_BACK, TOO_OLD, Question
from .keeper import CONFLICT, CONTRADICTION, UNKNOWN, Answer, status_of
from .models import PreparedEvent

State = PreparedEvent.State
#: What a keeper may answer about an event.
STATES = (*State.values, UNKNOWN, CONFLICT, CONTRADICTION)
OUTCOMES = (COMMITTED, ROLLED_BACK, IN_PROGRESS, TOO_OLD)
#: The statuses with which the keeper refuses a bad request, also when it is repeated.
REFUSED = (400, 403, 413, 415, 422)
#: The most seconds that a call takes while it holds a transaction open.
IN_TRANSACTION = 2.0


def call_in_parts(
    peer: Peer, method: str, path: str, payload: Any = None, **options: Any
) -> tuple[int, Any]:
    """Call a peer; in halves if the payload is too large, as only the peer knows its limits."""
    status, content = call(peer, method, path, payload, **options)
    if status != 413 or not payload or len(payload) == 1:
        return status, content
    middle, answers = len(payload) // 2, []
    for half in (payload[:middle], payload[middle:]):
        status, content = call_in_parts(peer, method, path, half, **options)
        if status != 200 or not isinstance(content, list):
            return status, content
        answers += content
    return status, answers


class HttpKeeper:
    #: The log is in another project.
    using = ""

    def __init__(self, name: str, alias: str) -> None:
        self.name = name
        try:
            self.peer = peer_named(name, KEEPER)
        except InvalidPeer as error:
            raise InvalidPrepared(str(error)) from error
        if alias != self.peer.database:
            raise InvalidPrepared(
                f"The keeper {name!r} asks about fences on {self.peer.database!r}, not on "
                f"{alias!r}. For each alias register a peer with its own keys."
            )

    def prepare(self, rows: Sequence[PreparedEvent]) -> list[Answer]:
        events = [cloudevent(each, source=f"/{self.name}") for each in rows]
        return self._send("", events, content_type=EVENTS)

    def decide(self, wanted: Mapping[UUID, str]) -> list[Answer]:
        asked = [{"id": str(id), "state": str(state)} for id, state in wanted.items()]
        return self._send("decide", asked)

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

    def _send(self, path: str, elements: Sequence[dict[str, Any]], **options: Any) -> list[Answer]:
        """Send elements in as few requests as fit; return the answer to each."""
        groups = chunks(
            elements,
            rows=limit(self.peer, "events"),
            bytes=limit(self.peer, "bytes") - 2,
            size=lambda element: len(written(element)) + 1,
        )
        answers: list[Answer] = []
        for group in groups:
            content = self._call("POST", f"prepared/{path}", group, **options)
            if len(content) != len(group):
                raise self._odd("sent an unexpected answer")
            answers += map(self._answer, group, content)
        return answers

    def _answer(self, sent: dict[str, Any], content: dict[str, Any]) -> Answer:
        id, status, state = sent["id"], content.get("status"), str(content.get("state"))
        if status in REFUSED:
            why = "may not be prepared by this service" if status == 403 else "is refused"
            raise InvalidPrepared(
                f"The event {id} {why}: the keeper {self.name!r} has answered {status}, and its "
                "log says why."
            )
        wanted = sent.get("state", State.PREPARED)
        is_new = status == 201 and state == wanted == State.PREPARED
        is_of_it = content.get("id") == id and state in STATES
        if not is_of_it or not (is_new or status == status_of(state, wanted)):
            raise self._odd(f"sent no answer for the event {id}")
        return Answer(UUID(id), state, is_new=is_new)

    def _call(self, method: str, path: str, payload: Any = None, **options: Any) -> list[Any]:
        options["seconds"] = IN_TRANSACTION if open_transactions() else SECONDS
        try:
            status, content = call_in_parts(self.peer, method, path, payload, **options)
        except PeerError as error:
            raise KeeperUnavailable(str(error)) from error
        if status in REFUSED:
            raise InvalidPrepared(f"The keeper {self.name!r} refused the request ({status}).")
        listed = isinstance(content, list) and all(isinstance(each, dict) for each in content)
        if status != 200 or not listed:
            raise self._odd(f"sent no list of answers (status {status})")
        return content  # type: ignore[no-any-return]

    def _odd(self, what: str) -> KeeperUnavailable:
        return KeeperUnavailable(f"The keeper {self.name!r} {what}.")


def ask_over_http(sender: str, questions: Sequence[Question]) -> dict[UUID, str]:
    peer = peer_named(sender, SENDER)
    sent = [
        {"id": str(id), "prepared_at": zoned(at), "stream": stream, "type": type}
        for id, at, stream, type in questions
    ]
    status, content = call_in_parts(peer, "POST", "check", sent)
    if status != 200 or not isinstance(content, list):
        raise PeerUnavailable(f"The sender {sender!r} sent no list of answers (status {status}).")
    asked = {str(each.event_id): each.event_id for each in questions}
    answers: dict[UUID, str] = {}
    for each in content:
        id = asked.get(str(each.get("id"))) if isinstance(each, dict) else None
        if id is None or id in answers:
            raise PeerUnavailable(f"The sender {sender!r} sent an unexpected answer.")
        if each.get("outcome") in OUTCOMES:
            answers[id] = each["outcome"]
    return answers
