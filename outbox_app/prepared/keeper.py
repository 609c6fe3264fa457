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
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timedelta
from functools import cache, partial
from itertools import groupby
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

import django.db
from celery.exceptions import SoftTimeLimitExceeded
from django.db import IntegrityError, connections, transaction
from django.db.models import DurationField

from ..eventlog.insert import chunks
from ..eventlog.newevent import NewEvent, checked
from ..eventlog.publish import publish_checked
from ..eventlog.registry import log_named
from ..exceptions import NotAtomic, PreparedError
from ..failpoints import failpoint
from ..jobs.staging.stage import stage
from ..models import DatabaseNow, Incident, PreparedEvent
from ..models.upsert import insert_rows
from ..process import counters
from ..process.backoff import described
from ..process.enclosure import LOST
from ..process.lock_wait import atomic_with_lock_wait, is_conflict
from ..process.tracing import inside, span_of, start_span
from ..signals import incident_recorded
from ..text import get_logger
from ..transactions import lacks_autocommit
from .request import content_hash

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


class Answer(NamedTuple):
    event_id: UUID
    #: A state, ``UNKNOWN``, ``CONFLICT`` or ``CONTRADICTION``.
    state: str
    detail: str = ""
    #: Whether this call has recorded the event.
    is_new: bool = False


class _Raced(django.db.OperationalError):
    """Another process has moved one of the rows."""


def prepare(sender: str, rows: Sequence[PreparedEvent], *, using: str) -> list[Answer]:
    """Record events of a sender, in a transaction of its own; return the state of each.

    An id that is known with the same content has the answer that it had, ``CONFLICT`` with other.
    """
    for row in rows:
        row.sender = sender
    events = PreparedEvent.objects.using(using).filter(sender=sender)
    events = events.filter(event_id__in=[row.event_id for row in rows])

    def record(first: bool) -> dict[UUID, PreparedEvent]:
        known = {} if first else {row.event_id: row for row in events.all()}
        _insert([row for row in rows if row.event_id not in known], using)
        return known

    known = _in_transaction(record, using)
    failpoint("prepared")
    answers = []
    for row in rows:
        kept = known.get(row.event_id, row)
        # An empty hash: it was cancelled before it was prepared.
        state = kept.state if kept.content_hash in (row.content_hash, "") else CONFLICT
        answers.append(Answer(row.event_id, state, is_new=kept is row))
    return answers


def _insert(rows: Sequence[PreparedEvent], using: str) -> None:
    """Insert new events. By hand: ``bulk_create`` takes thrice as long."""
    connection = connections[using]
    one, fields = _columns(using)
    stored = [[f.get_db_prep_save(getattr(row, n), connection) for n, f in fields] for row in rows]
    names = [name for name, _ in fields]
    sizes = [sum(len(each) for each in row if isinstance(each, str)) for row in stored]
    for chunk in chunks(stored, sizes, columns=len(fields), connection=connection):
        params = [each for row in chunk for each in row]
        with connection.cursor() as cursor:
            insert_rows(cursor, PreparedEvent, names, params, row=one)


@cache
def _columns(using: str) -> tuple[str, list[tuple[str, Any]]]:
    """Return what is written of a new event: the row of a statement, and the fields."""
    compiler = PreparedEvent.objects.using(using).query.get_compiler(using)
    later = (DatabaseNow() + timedelta(days=1)).resolve_expression(compiler.query)
    given = dict.fromkeys(["decide_by", "next_check_at"], compiler.compile(later)[0])
    later_given = ("id", "prepared_at", "decided_at")
    names = [f.name for f in PreparedEvent._meta.fields if f.name not in later_given]
    row = ", ".join(given.get(name, "%s") for name in names)
    fields = {n: DurationField() if n in given else PreparedEvent._meta.get_field(n) for n in names}
    return f"({row})", list(fields.items())


def decide(
    sender: str, wanted: Mapping[UUID, str], *, by: str, reason: str = "", using: str
) -> list[Answer]:
    """Confirm or cancel events, all in one transaction; in halves where one of them fails.

    An event that cannot be published, as its row was edited by hand, is undecided from then on, and
    says why. Errors of the database itself are raised, and the time limit of a task; what others
    hold is not decided, the rest is.

    Args:
        wanted: ``State.CONFIRMED`` or ``State.CANCELLED``, by the id of the event.
    """
    until = time.monotonic() + DECIDE_SECONDS

    def part(ids: Sequence[UUID]) -> list[Answer]:
        try:
            step = partial(_decide, sender, {id: wanted[id] for id in ids}, by, reason, using)
            answers, decided, now = _in_transaction(step, using)
            failpoint("decided_committed")
            if now:
                _count(decided, now, by if by in ROUTES else "person", using)
            return answers
        except (SoftTimeLimitExceeded, NotAtomic, *LOST) as error:
            if len(ids) == 1 or not is_conflict(error) or time.monotonic() > until:
                raise
        except Exception as error:
            if len(ids) == 1:
                return [_refused(sender, ids[0], error, using)]
        answers, held = [], None
        middle = len(ids) // 2
        for half in (ids[:middle], ids[middle:]):
            try:
                answers += part(half)
            except django.db.OperationalError as error:
                held = error
        if held:
            raise held
        return answers

    return part(list(wanted))


def _decide(
    sender: str, wanted: Mapping[UUID, str], by: str, reason: str, using: str, first: bool
) -> tuple[list[Answer], list[tuple[str, timedelta]], datetime | None]:
    events = PreparedEvent.objects.using(using)
    asked = events.filter(sender=sender, event_id__in=list(wanted)).annotate(now=DatabaseNow())
    rows: dict[UUID, Any] = {row.event_id: row for row in asked}
    moved: dict[str, list[Any]] = {State.CONFIRMED: [], State.CANCELLED: []}
    answers, unknown = [], []
    for id, state in wanted.items():
        row = rows.get(id)
        if row is None and state == State.CONFIRMED:
            answers.append(Answer(id, UNKNOWN))
        elif row is None:
            unknown.append(id)
            answers.append(Answer(id, state))
        elif row.state in PreparedEvent.OPEN and by == POLICY and row.decide_by > row.now:
            answers.append(Answer(id, row.state))  # a person has extended its time
        elif row.state in PreparedEvent.OPEN:
            moved[state].append(row)
            answers.append(Answer(id, state))
        elif row.state == state or by == POLICY:  # the call that came first had no policy in mind
            answers.append(Answer(id, row.state))
        else:
            answers.append(_contradiction(row, state, by, using))
    said = {"decided_at": DatabaseNow(), "decided_by": by[:255], "reason": reason[:10_000]}
    for state, found in moved.items():
        # By what a split table is split by.
        still = {"sender": sender, "event_id__in": [row.event_id for row in found]}
        changes = {"state": state, "next_check_at": None, **said}
        if found and events.filter(**still).open().update(**changes) != len(found):
            raise _Raced
    # A prepare that arrives after its cancel finds this row.
    dead = {"sender": sender, "state": State.CANCELLED, "decide_by": DatabaseNow()} | said
    events.bulk_create([PreparedEvent(event_id=id, **dead) for id in unknown])
    failpoint("decided")
    trace = partial(_trace, moved[State.CONFIRMED], time.time_ns())
    transaction.on_commit(trace, using=using)
    _publish(moved[State.CONFIRMED], using, first)
    took = [(state, row.now - row.prepared_at) for state, found in moved.items() for row in found]
    now = next((row.now for found in moved.values() for row in found), None)
    return answers, took, now


def _count(decided: Sequence[tuple[str, timedelta]], now: datetime, route: str, using: str) -> None:
    with counters.counting(now, using=using) as minute:
        for state, took in decided:
            label = f"{state} {route}"
            minute.add(counters.DECIDED, 1, dimension=counters.ROUTE, label=label)
            minute.observe(counters.DECIDE_TIME, took.total_seconds())
    counters.write_shared(using)


def _publish(rows: Sequence[PreparedEvent], using: str, first: bool) -> None:
    if any(content_hash(row) != row.content_hash for row in rows):
        raise PreparedError("The row differs from what was prepared: it was edited by hand.")
    for name, group in groupby(rows, key=lambda row: row.log):
        if not name:
            for job in group:
                with inside(span_of(job.content.get("headers"))):
                    stage(job.type, **job.content, task_id=str(job.event_id), using=using)
            continue
        log, new = log_named(name), []
        for row in group:
            event = NewEvent(row.stream, row.type, **row.content, topic=row.topic)
            event.message_id = row.event_id
            new.append(checked(event, log)._replace(repeatable=not first))
        publish_checked(new, log, dict.fromkeys(each.row.stream for each in new), using=using)


def _trace(rows: Sequence[Any], began: int) -> None:
    """Make a span of what was confirmed, in the trace of the request that prepared it."""
    carriers = (row.content.get("headers", row.content.get("metadata")) for row in rows)
    with inside(start_span("outbox confirm", carriers, kind="INTERNAL", start_time=began)):
        pass


def _contradiction(row: Any, wanted: str, by: str, using: str) -> Answer:
    detail = (
        f"The prepared event {row.event_id} of {row.sender!r} ({row.type}) is {row.state}, by "
        f"{row.decided_by}; {by} says {wanted}. Nothing was changed."
    )
    incidents = Incident.objects.using(using)
    key = {"kind": Incident.Kind.CONTRADICTION, "first_id": row.pk, "last_id": row.pk}
    if not incidents.filter(**key).exists():  # two calls at once write two
        incident = incidents.create(**key, detail=detail)
        tell = partial(incident_recorded.send_robust, Incident, using=using, incident=incident)
        transaction.on_commit(tell, using=using)  # a receiver that fails undoes nothing
    logger.error(
        "Contradiction event_id=%s state=%s told=%s by=%s", row.event_id, row.state, wanted, by
    )
    return Answer(row.event_id, CONTRADICTION, detail)


def _refused(sender: str, id: UUID, error: Exception, using: str) -> Answer:
    rows = PreparedEvent.objects.using(using).filter(sender=sender, event_id=id)
    reason = described(error)
    if not rows.open().update(state=State.UNDECIDED, next_check_at=None, reason=reason):
        # It is decided: a callback of the project's has failed after the commit.
        logger.error("Failed after the decision event_id=%s error=%r", id, error)
        return Answer(id, rows.values_list("state", flat=True).first() or UNKNOWN)
    logger.error("Not published event_id=%s error=%r", id, error)
    return Answer(id, State.UNDECIDED, reason)


def _in_transaction(step: Callable[[bool], Result], using: str) -> Result:
    """Run a step in a transaction, anew where another one has refused it.

    The first time a step does not look whether ids are taken: where one is, the unique index raises
    ``IntegrityError``, and the second time it looks. That saves four statements of ten.
    """
    if lacks_autocommit(connections[using]):
        raise NotAtomic(f"Autocommit is off on {using!r}: nothing would commit what is recorded.")
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
