"""Passes commands of a routed type to the server that leads their entity, to share its batches.

Commands that have gathered for one server go in one request, and the server that receives them
executes them: a command is passed on once, even if two servers each take the other for the leader.
Commands that the leader does not answer (it is dead, or stopped, or refuses) are executed here,
under the same command ids. So no answer depends on the leader: a late leader finds the answers.
Only projects with routed types need the door and the fleet: they are imported when they are used.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import astuple
from typing import Any
from zoneinfo import ZoneInfo

from celery.exceptions import SoftTimeLimitExceeded

from ..aliases import model_alias
from ..door.exceptions import PeerError
from ..events.log.newevent import slice_of
from ..fleet.conf import fleet_settings
from .exceptions import Overloaded
from .request import Call, Outcome, Rejection
from .series import ELSEWHERE, PASSED
from .transaction import scope_of

#: The longest time that a leader has to answer, in seconds.
SECONDS = 2.0


class NotForwarded(Exception):
    """The leader has not answered a command: this process has to execute it."""


def leader_of(call: Call, entity: Any, *, using: str) -> str:
    """Return the address of the server to pass a routed command to; empty if it stays here.

    The leader would use its own alias, and finds a time zone by its name: other calls stay.
    """
    has_name = isinstance(call.zone, ZoneInfo) and call.zone.key
    if not has_name or using != model_alias(entity.versions):
        return ""
    from ..fleet import topology

    try:
        leader = topology.other_leader(slice_of(call.id))
    except RuntimeError:  # the thread that pulls the list cannot start: the next call tries
        return ""
    if topology.is_avoided(leader):
        call.route = ELSEWHERE
        return ""
    return leader


def forward(entity: Any, calls: Sequence[Call], *, leader: str) -> None:
    """Let the leader answer the calls. A call that it does not answer gets ``NotForwarded``."""
    from ..door import client, peers
    from ..door.peers import BOTH
    from ..fleet import topology

    asked = [
        [c.id, c.command, c.arguments, c.command_id, c.expected, c.language, str(c.zone)]
        for c in calls
    ]
    seconds = max(min(SECONDS, max(call.seconds_left for call in calls) / 2), 0.001)
    for call in calls:  # from here on the leader may execute it
        call.answer, call.route, call.begun = NotForwarded(), ELSEWHERE, True
    try:
        peer = peers.peer_named(fleet_settings().SERVICE, BOTH)
        status, content = client.call(
            *(peer, "POST", "routed", {"type": entity._meta.label_lower, "commands": asked}),
            address=leader,
            seconds=seconds,
            most=peers.LIMITS["bytes"],
        )
        if status != 200 or len(content) != len(calls):
            raise PeerError(f"The answer is {status}.")
        for call, each in zip(calls, content, strict=True):
            if each is not None:
                response, version, no, replayed = each
                call.answer = Outcome(response, version, no and Rejection(*no), replayed)
    except SoftTimeLimitExceeded:  # of the task that this thread executes
        raise
    except Exception as error:  # after any error the commands can be executed here
        topology.avoid(leader, len(calls), error)


def answered_here(entity: Any, calls: Sequence[Call], seconds: float) -> list[Any]:
    """Execute commands of another server; return None for each that it has to answer itself."""
    from ..door.messages import written
    from ..door.peers import LIMITS
    from ..fleet import topology
    from .queue import QueueKey, queues  # queue imports this module

    using = model_alias(entity.versions)
    deadline, scope = time.monotonic() + min(seconds, entity.timeout), scope_of(using)
    entered: dict[Call, Any] = {}
    for call in calls:
        call.deadline = deadline
        call.route = ELSEWHERE if topology.other_leader(slice_of(call.id)) else PASSED
        # An Event, not an event loop: greenlets share a thread, which can run only one loop.
        call.waits, call.may_lead = threading.Event(), False
        with suppress(Overloaded):
            entered[call] = queues.enter(call, QueueKey(entity, using, call.id, scope))
    answers: list[Any] = [None] * len(calls)
    room = LIMITS["bytes"] - 5 * len(calls)
    for number, call in enumerate(calls):
        with suppress(Exception):  # a KeyError, too, if the queue has refused it
            queues.wait(entered[call], call)
            if isinstance(call.answer, Outcome):  # else what its handler raised, even SystemExit
                answer = astuple(call.answer)
                room -= len(written(answer))
                answers[number] = answer if room > 0 else None
    return answers
