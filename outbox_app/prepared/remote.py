"""Keeper and sender in two projects: each is called over HTTP, signed both ways.

No answer that is verified is no answer: ``KeeperUnavailable`` for a sender, silence for the
check-back. What was sent may have arrived. Each call may be repeated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any, TypeVar
from uuid import UUID

from ..door.client import SECONDS, call
from ..door.messages import EVENTS, MessageRefused, by_id, cloudevent, written
from ..door.peers import LIMITS, peer_named
from ..exceptions import InvalidPeer, InvalidPrepared, KeeperUnavailable, PeerError, PeerUnavailable
from ..models import Peer, PreparedEvent
from ..transactions import open_transactions
from .fences import COMMITTED, IN_PROGRESS, ROLLED_BACK, TOO_OLD
from .keeper import CONFLICT, CONTRADICTION, UNKNOWN, Answer, Decision
from .questions import Question
from .request import NewPrepared, Request, checked

State = PreparedEvent.State
OUTCOMES = (COMMITTED, ROLLED_BACK, IN_PROGRESS, TOO_OLD)
#: Seconds that a call takes at most while it holds a transaction open.
IN_TRANSACTION = 2.0

Item = TypeVar("Item")


class HttpKeeper:
    """The keeper of another service."""

    def __init__(self, name: str, alias: str) -> None:
        self.name = name
        try:
            self.peer = peer_named(name, Peer.Direction.KEEPER)
        except InvalidPeer as error:
            raise InvalidPrepared(str(error)) from error
        if alias != self.peer.database:
            raise InvalidPrepared(
                f"The keeper {name!r} asks for fences on {self.peer.database!r}, not on {alias!r}. "
                "Register a peer for each alias, with keys of its own."
            )

    def checked(self, new: NewPrepared) -> Request:
        return checked(new, remote=True)

    def prepare(self, requests: Sequence[Request]) -> list[Answer]:
        events = [
            cloudevent(
                each.event_id,
                each.type,
                source=f"/{self.name}",
                log=each.log,
                stream=each.stream,
                topic=each.topic,
                content=each.content,
                policy=each.policy,
                decide_by=each.decide_by,
                immune=each.immune,
            )
            for each in requests
        ]
        answers: list[Answer] = []
        for group in _groups(events):
            said = self._call("prepared/", group, content_type=EVENTS)
            if len(said) != len(group):
                raise KeeperUnavailable(f"The keeper {self.name!r} has answered something else.")
            pairs = zip(group, said, strict=True)
            answers += [self._prepared(UUID(event["id"]), each) for event, each in pairs]
        return answers

    def _prepared(self, id: UUID, said: Any) -> Answer:
        status, state = said.get("status"), said.get("state")
        if status in (403, 413, 415, 422):
            why = "may not be prepared by this service" if status == 403 else "is refused"
            raise InvalidPrepared(
                f"The event {id} {why}: the keeper {self.name!r} has answered {status}, and its "
                "log says why."
            )
        if said.get("id") != str(id) or (status, state) in ((200, None), (201, None)):
            raise KeeperUnavailable(f"The keeper {self.name!r} has answered something else.")
        if status in (200, 201, 409) and state in State.values:
            return Answer(id, state)
        return Answer(id, CONFLICT, "the id belongs to an event of other content")

    def decide(self, decisions: Sequence[Decision]) -> list[Answer]:
        answers: list[Answer] = []
        for group in _groups([{"id": str(id), "state": str(state)} for id, state in decisions]):
            wanted = {UUID(each["id"]): each["state"] for each in group}
            said = self._by_id(self._call("prepared/decide", group), wanted)
            answers += [self._told(id, said.get(id, {}), state) for id, state in wanted.items()]
        return answers

    def _told(self, id: UUID, said: Any, wanted: str) -> Answer:
        status, state = said.get("status"), said.get("state")
        if status == 200 and state == wanted:
            return Answer(id, wanted)
        if status == 404:
            return Answer(id, UNKNOWN)
        if status == 409 and state in PreparedEvent.OPEN:
            return Answer(id, state, "the keeper could not publish it; its log says why")
        if status == 409 and state in State.values:
            return Answer(
                id,
                CONTRADICTION,
                f"The prepared event {id} is {state} at the keeper {self.name!r}, which was told "
                f"{wanted}. Nothing was changed.",
            )
        raise KeeperUnavailable(f"The keeper {self.name!r} said nothing of the event {id}.")

    def open(self, skip: int = 0) -> list[Question]:
        """Return events of this sender that are open, some of them: for one nobody can call."""
        said = self._call(f"prepared/open?skip={skip}", method="GET")
        return [
            Question(
                UUID(each["id"]),
                datetime.fromisoformat(each["prepared_at"]),
                each["stream"],
                each["type"],
            )
            for each in said
        ]

    def _call(
        self, path: str, payload: Any = None, *, method: str = "POST", **options: Any
    ) -> list[Any]:
        seconds = IN_TRANSACTION if open_transactions() else SECONDS
        try:
            status, said = call(self.peer, method, path, payload, seconds=seconds, **options)
        except PeerError as error:
            raise KeeperUnavailable(str(error)) from error
        if status in (400, 403, 413, 415, 422):
            raise InvalidPrepared(f"The keeper {self.name!r} refuses the request: {status}.")
        if status != 200 or not isinstance(said, list):
            raise KeeperUnavailable(f"The keeper {self.name!r} has answered {status}.")
        if not all(isinstance(each, dict) for each in said):
            raise KeeperUnavailable(f"The keeper {self.name!r} has answered something else.")
        return said

    def _by_id(self, said: Any, ids: Any) -> dict[UUID, dict[str, Any]]:
        try:
            return by_id(said, list(ids))
        except MessageRefused as error:
            raise KeeperUnavailable(f"The keeper {self.name!r}: {error}") from error


class HttpSender:
    """A sender in another service, as the keeper asks it."""

    def __init__(self, name: str) -> None:
        self.peer = peer_named(name, Peer.Direction.SENDER)

    def check(self, questions: Sequence[Question]) -> dict[UUID, str]:
        asked = [
            {
                "id": str(each.event_id),
                "prepared_at": each.prepared_at.isoformat(),
                "stream": each.stream,
                "type": each.type,
            }
            for each in questions
        ]
        status, said = call(self.peer, "POST", "check", asked)
        if status != 200:
            raise PeerUnavailable(f"The sender {self.peer.name!r} has answered {status}.")
        found = by_id(said, [each.event_id for each in questions])
        outcomes = {id: each.get("outcome") for id, each in found.items()}
        return {id: str(outcome) for id, outcome in outcomes.items() if outcome in OUTCOMES}


def _groups(items: Sequence[Item]) -> Iterator[list[Item]]:
    """Yield requests of as many elements, and bytes, as one may have."""
    group: list[Item] = []
    size = 2
    for item in items:
        length = len(written(item)) + 1
        if group and (len(group) == LIMITS["events"] or size + length > LIMITS["bytes"]):
            yield group
            group, size = [], 2
        group.append(item)
        size += length
    if group:
        yield group
