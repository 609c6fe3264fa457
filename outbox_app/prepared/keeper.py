"""The keeper: records prepared events, and publishes or forgets them when they are decided.

Every move is one conditional UPDATE, and what follows from it (the event in its log, the job in the
outbox) is in the same transaction: both, or neither. Of two that decide at once, one moves the
row and the other one sees what it did. Confirmed and cancelled are final. A decision against one of
them is a contradiction, written down as an incident: a fence was not used, or a policy or a person
decided against what happened.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timedelta
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

import django.db
from django.db import IntegrityError

from ..eventlog.newevent import NewEvent, checked
from ..eventlog.publish import publish_checked
from ..eventlog.registry import log_named
from ..exceptions import OutboxError
from ..failpoints import failpoint
from ..jobs.staging.stage import stage
from ..models import DatabaseNow, Incident, PreparedEvent
from ..process.backoff import described
from ..process.lock_wait import atomic_with_lock_wait, is_conflict
from ..text import get_logger
from .counting import Decided, count
from .request import Request, content_hash

logger = get_logger("outbox_app.prepared")

State = PreparedEvent.State
#: Answers that are no state: there is no such event; its id belongs to another one; it was decided
#: otherwise.
UNKNOWN, CONFLICT, CONTRADICTION = "unknown", "conflict", "contradiction"
#: How a decision came: told by the sender, answered by it, by policy. A person has a name.
ROUTES = CALL, ANSWER, POLICY = "call", "answer", "policy"

#: Seconds for which a transaction waits for a lock, and for which it is done anew; seconds after
#: which a call gives up what others hold.
LOCK_SECONDS, DECIDE_SECONDS = 2.0, 5.0

Result = TypeVar("Result")


class Decision(NamedTuple):
    event_id: UUID
    #: ``State.CONFIRMED`` or ``State.CANCELLED``.
    state: str


class Answer(NamedTuple):
    event_id: UUID
    #: A state, ``UNKNOWN``, ``CONFLICT`` or ``CONTRADICTION``.
    state: str
    detail: str = ""


class _Raced(django.db.OperationalError):
    """Another process has moved one of the rows."""


class _Damaged(OutboxError):
    """The row is not what was prepared: it was edited by hand."""


def prepare(sender: str, requests: Sequence[Request], *, using: str) -> list[Answer]:
    """Record events of a sender, in a transaction of its own; return the state of each.

    An id that is known with the same content has the answer that it had, ``CONFLICT`` with other.
    """
    hashes = {each.event_id: each.hash for each in requests}
    rows = [
        PreparedEvent(
            sender=sender,
            event_id=each.event_id,
            log=each.log,
            stream=each.stream,
            type=each.type,
            topic=each.topic,
            content=each.content,
            content_hash=hashes[each.event_id],
            policy=each.policy,
            decide_by=DatabaseNow() + timedelta(seconds=each.decide_by),
            next_check_at=DatabaseNow() + timedelta(seconds=min(each.immune, each.decide_by)),
        )
        for each in requests
    ]
    events = PreparedEvent.objects.using(using).filter(sender=sender)

    def record(first: bool) -> dict[UUID, tuple[str, str]]:
        events.bulk_create(rows, ignore_conflicts=not first)
        if first:
            return {row.event_id: (row.state, row.content_hash) for row in rows}
        found = events.filter(event_id__in=list(hashes))
        return {row.event_id: (row.state, row.content_hash) for row in found}

    states = _in_transaction(record, using)
    failpoint("prepared")
    answers = []
    for id, hash in hashes.items():
        state, recorded = states[id]
        if recorded in (hash, ""):  # empty: cancelled before it was prepared
            answers.append(Answer(id, state))
        else:
            answers.append(Answer(id, CONFLICT, "the id belongs to an event of other content"))
    return answers


def decide(
    sender: str, decisions: Sequence[Decision], *, by: str, reason: str = "", using: str
) -> list[Answer]:
    """Confirm or cancel events, all in one transaction; in halves where one of them fails.

    An event that cannot be published, as its row was edited by hand, is undecided from then on, and
    says why. Errors of the database itself are raised; what others hold is not decided, the rest
    is.
    """
    until = time.monotonic() + DECIDE_SECONDS

    def part(decisions: Sequence[Decision]) -> list[Answer]:
        try:
            step = partial(_decide, sender, decisions, by, reason, using)
            answers, decided, now = _in_transaction(step, using)
            failpoint("decided_committed")
            if now:
                count(decided, now, by if by in ROUTES else "person", using=using)
            return answers
        except (django.db.OperationalError, django.db.InterfaceError) as error:
            if len(decisions) == 1 or not is_conflict(error) or time.monotonic() > until:
                raise
        except Exception as error:
            if len(decisions) == 1:
                return [_refused(sender, decisions[0], error, using)]
        answers, held = [], None
        middle = len(decisions) // 2
        for half in (decisions[:middle], decisions[middle:]):
            try:
                answers += part(half)
            except django.db.OperationalError as error:
                held = error
        if held:
            raise held
        return answers

    return part([Decision(*each) for each in dict(decisions).items()])


def _decide(
    sender: str, decisions: Sequence[Decision], by: str, reason: str, using: str, first: bool
) -> tuple[list[Answer], list[Decided], datetime | None]:
    events = PreparedEvent.objects.using(using).filter(sender=sender)
    asked = events.filter(event_id__in=[d[0] for d in decisions]).annotate(now=DatabaseNow())
    rows: dict[UUID, Any] = {row.event_id: row for row in asked}
    answers, moved = [], {}
    for id, wanted in decisions:
        row = rows.get(id)
        if row is None and wanted == State.CONFIRMED:
            answers.append(Answer(id, UNKNOWN))
        elif row is None or row.state in PreparedEvent.OPEN:
            moved[id] = wanted
            answers.append(Answer(id, wanted))
        elif row.state == wanted or by == POLICY:  # the call that came first had no policy in mind
            answers.append(Answer(id, row.state))
        else:
            answers.append(_contradiction(row, wanted, by, using))
    said = {"decided_at": DatabaseNow(), "decided_by": by[:255], "reason": reason[:10_000]}
    said["next_check_at"] = None
    for state in (State.CONFIRMED, State.CANCELLED):
        pks = [rows[id].pk for id, wanted in moved.items() if wanted == state and id in rows]
        if pks and events.open().filter(pk__in=pks).update(state=state, **said) != len(pks):
            raise _Raced
    # A prepare that arrives after its cancel finds this row.
    dead = {"sender": sender, "state": State.CANCELLED, "decide_by": DatabaseNow()} | said
    events.bulk_create([PreparedEvent(event_id=id, **dead) for id in moved if id not in rows])
    failpoint("decided")
    confirmed = [rows[id] for id, wanted in moved.items() if wanted == State.CONFIRMED]
    _publish(confirmed, using, first)
    now = next((row.now for id, row in rows.items() if id in moved), None)
    took = [(moved[id], row.now - row.prepared_at) for id, row in rows.items() if id in moved]
    return answers, [Decided(state, time.total_seconds()) for state, time in took], now


def _publish(rows: Sequence[PreparedEvent], using: str, first: bool) -> None:
    for name, events in groupby(rows, key=lambda row: row.log):
        group = list(events)
        for row in group:
            published = (row.log, row.stream, row.type, row.topic, row.content)
            if content_hash(*published) != row.content_hash:
                raise _Damaged("The row differs from what was prepared: it was edited by hand.")
        if name:
            log = log_named(name)
            new = [
                checked(
                    NewEvent(r.stream, r.type, topic=r.topic, message_id=r.event_id, **r.content),
                    log,
                )._replace(repeatable=not first)
                for r in group
            ]
            publish_checked(new, log, {r.stream: None for r in group}, using=using)
            continue
        for row in group:
            stage(row.type, **row.content, task_id=str(row.event_id), using=using)


def _contradiction(row: PreparedEvent, wanted: str, by: str, using: str) -> Answer:
    detail = (
        f"The prepared event {row.event_id} of {row.sender!r} ({row.type}) is {row.state}, by "
        f"{row.decided_by}; {by} says {wanted}. Nothing was changed."
    )
    Incident.objects.using(using).get_or_create(  # one for each event
        kind=Incident.Kind.CONTRADICTION,
        first_id=row.pk,
        last_id=row.pk,
        defaults={"detail": detail},
    )
    logger.error(
        "Contradiction event=%s state=%s told=%s by=%s", row.event_id, row.state, wanted, by
    )
    return Answer(row.event_id, CONTRADICTION, detail)


def _refused(sender: str, decision: Decision, error: Exception, using: str) -> Answer:
    logger.error("Not published event=%s error=%r", decision.event_id, error)
    rows = PreparedEvent.objects.using(using).filter(sender=sender, event_id=decision.event_id)
    reason = described(error)
    rows.open().update(state=State.UNDECIDED, next_check_at=None, reason=reason)
    return Answer(decision.event_id, State.UNDECIDED, reason)


def _in_transaction(step: Callable[[bool], Result], using: str) -> Result:
    """Run a step in a transaction, anew where another one has refused it.

    The first time a step does not look whether ids are taken: where one is, the unique index raises
    ``IntegrityError``, and the second time it looks. That saves four statements of ten.
    """
    first, until = True, time.monotonic() + LOCK_SECONDS
    while True:
        try:
            with atomic_with_lock_wait(LOCK_SECONDS, using=using):
                return step(first)
        except (IntegrityError, django.db.OperationalError) as error:
            taken = isinstance(error, IntegrityError)
            again = taken or isinstance(error, _Raced) or is_conflict(error)
            if not again or (time.monotonic() > until and not (first and taken)):
                raise
        first = False
        time.sleep(random.uniform(0, 0.05))
