"""The keeper: records prepared events, and publishes or drops them when they are decided.

Each change of state is one conditional UPDATE. Its effect (the event in its log, the job in the
outbox) is in the same transaction, so both happen or neither. If two processes decide at once, one
updates the row and the other sees that decision. Confirmed and cancelled are final. A decision
against a final state is a contradiction, and is recorded as an incident: a fence was not used, or a
policy or a person decided against what happened.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import timedelta
from functools import cache, partial
from itertools import groupby
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

import django.db
from celery.exceptions import SoftTimeLimitExceeded
from django.db import IntegrityError, connections, transaction
from django.db.models import DurationField, Model

from ..database.clock import DatabaseNow
from ..database.encoding import replaced
from ..database.lock_wait import atomic_with_lock_wait, is_conflict
from ..database.transaction_guard import is_lost
from ..database.transactions import lacks_autocommit
from ..database.upsert import insert_rows
from ..events.exceptions import MessageIdConflict
from ..events.log.insert import insert_chunks
from ..events.log.newevent import NewEvent, checked
from ..events.log.publish import publish_checked
from ..events.log.registry import log_named
from ..events.models import EventLog
from ..exceptions import NotAtomic
from ..failpoints import failpoint
from ..jobs.drain.incidents import record_incident
from ..jobs.staging.insert import CHUNK_ROWS
from ..jobs.staging.stage import stage
from ..models import Incident
from ..process import counters
from ..process.endings import comes_from_outside
from ..process.tracing import inside, span_of, start_span
from ..text import error_text, get_logger
from .exceptions import PreparedError
from .models import PreparedEvent
from .request import content_hash
from .series import DECIDE_TIME, DECIDED, ROUTE

logger = get_logger("outbox_app.prepared")

State = PreparedEvent.State
#: Answers that are no state: the event is unknown; its id belongs to another event; the event was
#: decided otherwise.
UNKNOWN, CONFLICT, CONTRADICTION = "unknown", "conflict", "contradiction"
#: How a decision came: by a call or an answer of the sender, or by policy. Or a person's name.
ROUTES = CALL, ANSWER, POLICY = "call", "answer", "policy"

#: What a person can do with an event whose id was published otherwise after it was prepared.
TAKEN = (
    " It cannot be confirmed, as the log has another event with its id. If its transaction has "
    "committed, publish its content under a new id; then cancel it."
)

#: Seconds that a transaction waits for a lock, and for which it is repeated; seconds after which
#: ``decide`` gives up events that others hold.
LOCK_SECONDS, DECIDE_SECONDS = 2.0, 5.0

Result = TypeVar("Result")


class Answer(NamedTuple):
    event_id: UUID
    #: A state, ``UNKNOWN``, ``CONFLICT`` or ``CONTRADICTION``.
    state: str
    detail: str = ""
    #: Whether this call has recorded the event.
    is_new: bool = False


def status_of(state: str, wanted: str) -> int:
    """Return the HTTP status that tells ``state`` to a sender that wants ``wanted``."""
    return 200 if state == wanted else 404 if state == UNKNOWN else 409


class _Raced(django.db.OperationalError):
    """Another process has changed the state of one of the rows."""


def prepare(sender: str, rows: Sequence[PreparedEvent], *, using: str) -> list[Answer]:
    """Record events of a sender, in a transaction of its own; return the state of each.

    A known id gets the state of its event if the content is the same, otherwise ``CONFLICT``. So
    does an id that the log has, or another sender's event in that log: a confirm would fail, after
    the sender's commit. Nothing reserves an id: if it is published between prepare and confirm, the
    event becomes undecided.
    """
    for row in rows:
        row.sender = sender
    events = PreparedEvent.objects.using(using).filter(sender=sender)
    events = events.filter(event_id__in=[row.event_id for row in rows])

    def record(first: bool) -> tuple[dict[UUID, PreparedEvent], dict[UUID, str]]:
        taken = _taken(sender, rows, using)
        known = {row.event_id: row for row in events.all()} if taken or not first else {}
        _insert([r for r in rows if r.event_id not in known and r.event_id not in taken], using)
        return known, taken

    known, taken = _in_transaction(record, using)
    failpoint("prepared")
    answers = []
    for row in rows:
        kept = known.get(row.event_id, row)
        # The hash is empty if the event was cancelled before it was prepared.
        state = kept.state if kept.content_hash in (row.content_hash, "") else CONFLICT
        if state == State.PREPARED and row.event_id in taken:
            state = taken[row.event_id]
            logger.warning(
                "Prepared event refused, its id is taken sender=%s event_id=%s log=%s answer=%s",
                *(sender, row.event_id, row.log or "-", state),
            )
        answers.append(Answer(row.event_id, state, is_new=kept is row and state == State.PREPARED))
    return answers


def _taken(sender: str, rows: Sequence[PreparedEvent], using: str) -> dict[UUID, str]:
    """Return which ids the log or another sender's event has, and what to answer about each."""
    taken: dict[UUID, str] = {}
    for name in {row.log for row in rows}:
        group = [row for row in rows if row.log == name]
        for start in range(0, len(group), CHUNK_ROWS):  # databases limit the number of parameters
            by_id = {row.event_id: row for row in group[start : start + CHUNK_ROWS]}
            # Nothing finds the ids of jobs that were staged otherwise.
            in_log = name and _has(log_named(name), "message_id", by_id, using)
            if in_log or _has(PreparedEvent, "event_id", by_id, using):
                taken |= _answers(sender, name, by_id, using)
    return taken


def _has(model: type[Model], column: str, ids: Collection[UUID], using: str) -> bool:
    """Look by SQL of our own: a query set takes longer to build than the database to answer."""
    connection = connections[using]
    field: Any = model._meta.get_field(column)
    table = connection.ops.quote_name(model._meta.db_table)
    slots = ", ".join(["%s"] * len(ids))
    with connection.cursor() as cursor:
        cursor.execute(
            f"SELECT 1 FROM {table} WHERE {column} IN ({slots}) LIMIT 1",
            [field.get_db_prep_value(id, connection) for id in ids],
        )
        return cursor.fetchone() is not None


def _answers(
    sender: str, name: str, by_id: Mapping[UUID, PreparedEvent], using: str
) -> dict[UUID, str]:
    """Return the answers about taken ids.

    If the log has the very event, it was confirmed, and the row of its decision was pruned.
    """
    others = PreparedEvent.objects.using(using).filter(log=name, event_id__in=list(by_id))
    others = others.exclude(sender=sender).exclude(state=State.CANCELLED)
    answers: dict[UUID, str] = {}
    if name:
        for event in log_named(name)._base_manager.using(using).filter(message_id__in=list(by_id)):
            same = _hash_of(event) == by_id[event.message_id].content_hash
            answers[event.message_id] = State.CONFIRMED if same else CONFLICT
    return answers | dict.fromkeys(others.values_list("event_id", flat=True), CONFLICT)


def _hash_of(event: EventLog) -> str:
    """Return the content hash of a prepared event that was published as this one."""
    content = {"data": event.data, "metadata": event.metadata}
    names = {"stream": event.stream, "type": event.type, "topic": event.topic}
    return content_hash(PreparedEvent(log=event._meta.db_table, content=content, **names))


def _insert(rows: Sequence[PreparedEvent], using: str) -> None:
    """Insert new events, by SQL of our own: ``bulk_create`` takes three times as long."""
    connection = connections[using]
    one, fields = _columns(using)
    stored = [[f.get_db_prep_save(getattr(row, n), connection) for n, f in fields] for row in rows]
    names = [name for name, _ in fields]
    for chunk in insert_chunks(stored, _size, columns=len(fields), connection=connection):
        params = [each for row in chunk for each in row]
        with connection.cursor() as cursor:
            insert_rows(cursor, PreparedEvent, names, params, row=one)


def _size(row: Sequence[Any]) -> int:
    return sum(len(each) for each in row if isinstance(each, str))


@cache
def _columns(using: str) -> tuple[str, list[tuple[str, Any]]]:
    """Return the SQL of one row in the INSERT of new events, and the fields of its values."""
    compiler = PreparedEvent.objects.using(using).query.get_compiler(using)
    later = (DatabaseNow() + timedelta(days=1)).resolve_expression(compiler.query)
    terms = dict.fromkeys(["decide_by", "next_check_at"], compiler.compile(later)[0])
    later_given = ("id", "prepared_at", "decided_at")
    names = [f.name for f in PreparedEvent._meta.fields if f.name not in later_given]
    row = ", ".join(terms.get(name, "%s") for name in names)
    fields = {n: DurationField() if n in terms else PreparedEvent._meta.get_field(n) for n in names}
    return f"({row})", list(fields.items())


def decide(
    sender: str, wanted: Mapping[UUID, str], *, by: str, reason: str = "", using: str
) -> list[Answer]:
    """Confirm or cancel events in one transaction; in halves if one of them fails.

    An event that cannot be published, because its row was edited by hand, becomes undecided, and
    its reason says why. Errors of the database, and a task's time limit, are raised. If others
    hold rows for too long, the remaining events are decided before that error is raised.

    Args:
        wanted: ``State.CONFIRMED`` or ``State.CANCELLED``, by the id of the event.
    """
    until = time.monotonic() + DECIDE_SECONDS

    def part(ids: Sequence[UUID]) -> list[Answer]:
        try:
            step = partial(_decide, sender, {id: wanted[id] for id in ids}, by, reason, using)
            answers, decided = _in_transaction(step, using)
            failpoint("decided_committed")
            if decided:
                _count(decided, by if by in ROUTES else "person", using)
            return answers
        except (SoftTimeLimitExceeded, NotAtomic):
            raise
        except BaseException as error:
            if comes_from_outside(error):
                raise
            if is_lost(error):
                if len(ids) == 1 or not is_conflict(error) or time.monotonic() > until:
                    raise
            elif len(ids) == 1:
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
) -> tuple[list[Answer], list[tuple[str, Any]]]:
    """Return the answers, and the rows that this has decided, each with its new state."""
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
            answers.append(Answer(id, row.state))  # a person has given it more time
        elif row.state in PreparedEvent.OPEN:
            moved[state].append(row)
            answers.append(Answer(id, state))
        elif row.state == state or by == POLICY:  # a policy does not contradict a decision
            answers.append(Answer(id, row.state))
        else:
            answers.append(_contradiction(row, state, by, using))
    by, reason = replaced(by, using=using)[:255], replaced(reason, using=using)[:10_000]
    decision = {"decided_at": DatabaseNow(), "decided_by": by, "reason": reason}
    for state, found in moved.items():
        # Not by pk: a table may be partitioned by these columns.
        still = {"sender": sender, "event_id__in": [row.event_id for row in found]}
        changes = {"state": state, "next_check_at": None, **decision}
        if found and events.filter(**still).open().update(**changes) != len(found):
            raise _Raced
    # A prepare that arrives after its cancel finds this row.
    dead = {"sender": sender, "state": State.CANCELLED, "decide_by": DatabaseNow()} | decision
    events.bulk_create([PreparedEvent(event_id=id, **dead) for id in unknown])
    failpoint("decided")
    confirmed = moved[State.CONFIRMED]
    transaction.on_commit(partial(_trace, confirmed, time.time_ns()), using=using)
    _publish(confirmed, using, first)
    return answers, [(state, row) for state, found in moved.items() for row in found]


def _count(decided: Sequence[tuple[str, Any]], route: str, using: str) -> None:
    with counters.counting(decided[0][1].now, using=using) as minute:
        for state, row in decided:
            label = f"{state} {route}"
            minute.add(DECIDED, 1, dimension=ROUTE, label=label)
            minute.observe(DECIDE_TIME, (row.now - row.prepared_at).total_seconds())
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
    """Make the span of confirmed events, in the trace of the request that prepared them."""
    carriers = (row.content.get("headers", row.content.get("metadata")) for row in rows)
    with inside(start_span("outbox confirm", carriers, kind="INTERNAL", start_time=began)):
        pass


def _contradiction(row: Any, wanted: str, by: str, using: str) -> Answer:
    detail = (
        f"The prepared event {row.event_id} of {row.sender!r} ({row.type}) is {row.state} (by "
        f"{row.decided_by}), so it cannot be {wanted} (by {by}). Nothing was changed."
    )
    kind = Incident.Kind.CONTRADICTION
    known = Incident.objects.using(using).filter(kind=kind, first_id=row.pk, last_id=row.pk)
    if not known.exists():  # two calls at once record two incidents
        record_incident(kind, shards=set(), ids=[row.pk], detail=detail, using=using)
    logger.error(
        "Prepared event was decided otherwise before event_id=%s state=%s wanted=%s by=%s",
        row.event_id,
        row.state,
        wanted,
        by,
    )
    return Answer(row.event_id, CONTRADICTION, detail)


def _refused(sender: str, id: UUID, error: BaseException, using: str) -> Answer:
    rows = PreparedEvent.objects.using(using).filter(sender=sender, event_id=id)
    reason = replaced(error_text(error), using=using)
    if isinstance(error, MessageIdConflict):
        reason += TAKEN
    if not rows.open().update(state=State.UNDECIDED, next_check_at=None, reason=reason):
        # The event is decided: a callback of the project has failed after the commit.
        logger.error("Callback failed after the decision event_id=%s error=%s", id, error)
        return Answer(id, rows.values_list("state", flat=True).first() or UNKNOWN)
    logger.error("Prepared event not published event_id=%s reason=%s", id, reason)
    return Answer(id, State.UNDECIDED, reason)


def _in_transaction(step: Callable[[bool], Result], using: str) -> Result:
    """Run a step in a transaction; repeat it if another transaction interferes.

    The first time, a step assumes that all ids are new: if one exists, the unique index raises
    ``IntegrityError``, and the second time the step looks. That saves four statements of ten.
    """
    if lacks_autocommit(connections[using]):
        raise NotAtomic(f"Autocommit is off on {using!r}: the keeper's changes would not commit.")
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
