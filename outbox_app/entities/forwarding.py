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
from math import inf
from typing import Any
from zoneinfo import ZoneInfo

from celery.exceptions import SoftTimeLimitExceeded

from ..aliases import model_alias
from ..door.exceptions import PeerError
from ..events.log.newevent import slice_of
from ..fleet.conf import fleet_settings
from .exceptions import Overloaded
from .request import Call
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
    from .messages import forwarded_object, outcome_of

    seconds = max(min(SECONDS, max(call.seconds_left for call in calls) / 2), 0.001)
    for call in calls:  # from here on the leader may execute it
        call.answer, call.route, call.begun = NotForwarded(), ELSEWHERE, True
    try:
        peer = peers.peer_named(fleet_settings().SERVICE, BOTH)
        status, content = client.call(
            *(
                peer,
                "POST",
                f"routed/{entity._meta.label_lower}",
                list(map(forwarded_object, calls)),
            ),
            address=leader,
            seconds=seconds,
            most=peers.LIMITS["bytes"],
        )
        if status != 200 or len(content) != len(calls):
            raise PeerError(f"The answer is {status}.")
        for call, each in zip(calls, content, strict=True):
            if each is not None:
                if (outcome := outcome_of(each)) is None:
                    raise PeerError("An answer is not of the form of answers.")
                call.answer = outcome
    except SoftTimeLimitExceeded:  # of the task that this thread executes
        raise
    except Exception as error:  # after any error the commands can be executed here
        topology.avoid(leader, len(calls), error)


def answered_here(
    entity: Any, calls: Sequence[Call], seconds: float | None, *, forwarded: bool = False
) -> list[Any]:
    """Execute commands of another server or service; return an outcome, or an error, for each.

    They share the batches of this process's own callers.

    Args:
        seconds: How long the caller waits. No command waits longer than the type's ``timeout``.
        forwarded: Whether another server of this service has passed them on.
    """
    from .queue import QueueKey, answer_many, belongs_here, queues  # queue imports this module

    using = model_alias(entity.versions)
    deadline, scope = time.monotonic() + min(seconds or inf, entity.timeout), scope_of(using)
    for call in calls:
        call.deadline = deadline
    if forwarded:
        from ..fleet import topology

        for call in calls:
            call.route = ELSEWHERE if topology.other_leader(slice_of(call.id)) else PASSED
    if belongs_here(entity, using):
        answer_many(entity, calls, using=using, until=deadline)
        return [call.answer for call in calls]
    entered: list[Any] = []
    for call in calls:
        # An Event, not an event loop: greenlets share a thread, which can run only one loop.
        call.waits, call.may_lead = threading.Event(), False
        try:
            entered.append(queues.enter(call, QueueKey(entity, using, call.id, scope)))
        except Overloaded as error:
            entered.append(error)
    answers: list[Any] = []
    for call, queue in zip(calls, entered, strict=True):
        try:
            if isinstance(queue, Overloaded):
                raise queue
            queues.wait(queue, call)
            answers.append(call.answer)
        except Exception as error:  # its batch may go on: until that commits, its answer is none
            answers.append(error)
    return answers
