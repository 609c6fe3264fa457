"""The sender's side: prepare, the fence in the business transaction, then confirm or cancel.

``prepared()`` does all of this as a block. An error that the block raises does not show whether the
transaction was committed: a COMMIT may have worked although its reply was lost. So after an error
the block asks its own fence, exactly as a check-back does, and sends the outcome to the keeper, or
nothing if the fence gives no answer. The check-back makes up for a lost confirm or cancel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from functools import cache, partial
from typing import Any
from uuid import UUID

from asgiref.sync import sync_to_async
from celery.exceptions import SoftTimeLimitExceeded
from django.db import connections, transaction
from django.utils import timezone

from ..database.transactions import after_commit, is_atomic, is_in_test, open_transactions
from ..exceptions import NotAtomic
from ..process.background import Background
from ..process.preflight import require_migrated
from ..text import get_logger
from .exceptions import (
    Contradiction,
    FencedOut,
    InvalidPrepared,
    KeeperUnavailable,
    PreparedConflict,
    PreparedError,
    UnknownPrepared,
)
from .fences import COMMITTED, OF_ANOTHER, ROLLED_BACK, Question, fence, outcomes
from .keeper import CONFLICT, CONTRADICTION, UNKNOWN
from .local import LocalKeeper
from .models import Fence, PreparedEvent
from .request import NewPrepared, checked

logger = get_logger("outbox_app.prepared")

State = PreparedEvent.State
#: Calls without an answer: a confirm after the commit must not hold up a request.
calls = Background("outbox-one-way", threads=2, longest=10_000, together=100, at_exit=2.0)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A recorded event. Fence, confirm or cancel it."""

    event_id: UUID
    #: Alias of the business transaction.
    using: str
    #: The keeper's service; empty for this project.
    to: str
    request: PreparedEvent
    #: The time by the clock of this process, before it called the keeper.
    prepared_at: datetime


def keeper_of(to: str, using: str) -> Any:
    """Return the keeper of a service, as a sender on an alias calls it."""
    if to:
        from .remote import HttpKeeper  # needs the extra door

        return HttpKeeper(to, using)
    return LocalKeeper(using)


@contextmanager
def prepared(
    stream: str = "",
    type: str = "",
    data: Any = None,
    *,
    using: str,
    to: str = "",
    wait: bool = False,
    **options: Any,
) -> Iterator[Prepared]:
    """Prepare an event, open a transaction, and have the event published if it commits.

    The block is the business transaction: ``atomic(using)``, with the fence as its first statement.

    Args:
        stream, type, data: As for ``publish()``.
        using: Database alias of the business rows; it must differ from that of the keeper's log.
        to: The service that is the keeper. Default: this project.
        wait: Send the outcome before the block is left. Default: a thread sends it after the
            commit. If either fails, the keeper asks; no error is raised after a commit.
        **options: ``topic``, ``metadata``, ``log`` as for ``publish()``. ``event_id``: a UUID that
            makes the call repeatable (default: a new one). ``policy``: what to do with an outcome
            that is unknown at ``decide_by`` (seconds, default a day): "ask", "cancel" or "confirm"
            (default: "ask"). ``immune``: seconds during which the keeper does not ask (default 10).
            ``job``: a task name, with ``args`` and ``kwargs``, instead of an event.

    Raises:
        InvalidPrepared: The event could never be published. The transaction was not begun.
        NotMigrated: The alias has no table of fences. Nothing was sent.
        PreparedConflict: The id belongs to another event, or to an event that is decided.
        KeeperUnavailable: The keeper gave no answer. The transaction was not begun.
        FencedOut: The keeper asked before the transaction began. The transaction is rolled back.
    """
    new = NewPrepared(stream, type, data, **options)
    with prepared_many([new], using=using, to=to, wait=wait) as [event]:
        yield event


@contextmanager
def prepared_many(
    events: Sequence[NewPrepared], *, using: str, to: str = "", wait: bool = False
) -> Iterator[list[Prepared]]:
    """Do what ``prepared()`` does, for several events: one request, and a fence for each."""
    recorded = prepare_many(events, using=using, to=to)
    try:
        with transaction.atomic(using=using):
            for event in recorded:
                fence(event)
            yield recorded
            confirm_on_commit(*recorded, wait=wait)
    except BaseException:
        # Inside an outer transaction nothing is certain yet: the check-back finds out.
        if not is_atomic(using):
            _tell_what_fences_say(recorded, wait=wait)
        raise
    if is_in_test(using) and not is_atomic(using):  # leaving the block counts as the commit
        _tell_what_fences_say(recorded, wait=True)


def prepare(
    stream: str = "", type: str = "", data: Any = None, *, using: str, to: str = "", **options: Any
) -> Prepared:
    """Record an event with its keeper, before the transaction that it depends on.

    It joins no transaction: when it returns, the keeper has the event, and no reader sees it. Then
    open ``atomic(using)``, call ``fence(event)`` first, and after the commit ``confirm(event)``.

    Args, Raises: As for ``prepared()``.
    """
    [event] = prepare_many([NewPrepared(stream, type, data, **options)], using=using, to=to)
    return event


def prepare_many(events: Sequence[NewPrepared], *, using: str, to: str = "") -> list[Prepared]:
    """Do what ``prepare()`` does, for several events in one request: all, or an error."""
    if using not in connections:
        raise InvalidPrepared(f"using={using!r}: there is no such database alias.")
    keeper = keeper_of(to, using)
    if not connections[using].in_atomic_block:
        _require_fences(using)
    requests = [checked(new, using=keeper.using) for new in events]
    if len({each.event_id for each in requests}) < len(requests):
        raise InvalidPrepared("Two of the events have the same event_id. Give each its own.")
    for alias in open_transactions():
        _warn_once(alias)
    now = timezone.now()
    for request, answer in zip(requests, keeper.prepare(requests), strict=True):
        if answer.state != State.PREPARED:
            found = f"is {answer.state} already"
            if answer.state == CONFLICT:
                found = "belongs to an event with other content, or of another sender"
            raise PreparedConflict(
                f"The event id {request.event_id} {found}. Do not begin the transaction; a new "
                "event needs a new id."
            )
    return [Prepared(each.event_id, using, to, each, now) for each in requests]


@cache  # once the table exists, it is not looked for again
def _require_fences(using: str) -> None:
    require_migrated(using, Fence)


def confirm(*events: Prepared, wait: bool = True) -> None:
    """Tell the keeper to publish events, whose fences must show that they were committed.

    Args:
        events: What ``prepare()`` returned.
        wait: Wait for the answer of the keeper. Otherwise a thread calls it.

    Raises:
        FencedOut: The transaction has not committed, or it wrote no fence. Nothing was sent.
        KeeperUnavailable: The keeper gave no answer. Its check-back finds the outcome.
        Contradiction: The event was cancelled before, by a person or a policy.
    """
    hint = " Call fence(event) inside the transaction, and confirm(event) after it has committed."
    _require_outcome(events, COMMITTED, "confirmed", hint)
    _tell(events, State.CONFIRMED, wait=wait)


def cancel(*events: Prepared, wait: bool = True) -> None:
    """Withdraw events: from then on no transaction that fences one of them can commit.

    Raises:
        FencedOut: The transaction has committed already, or is open. Nothing was sent.
        KeeperUnavailable, Contradiction: As for ``confirm()``.
    """
    _require_outcome(events, ROLLED_BACK, "cancelled")
    _tell(events, State.CANCELLED, wait=wait)


def confirm_on_commit(*events: Prepared, wait: bool = False) -> None:
    """Confirm events when the open transaction of their alias commits.

    For code that does not see the commit, as under ``ATOMIC_REQUESTS``. A rollback is not reported:
    the check-back finds it.

    Raises:
        NotAtomic: No transaction is open on the alias of an event.
    """
    tell = partial(_tell, state=State.CONFIRMED, wait=wait)
    for (_, using), group in _by_keeper(events):
        if not connections[using].in_atomic_block:  # on_commit() would confirm at once
            raise NotAtomic(f"confirm_on_commit() was called outside a transaction on {using!r}.")
        after_commit(partial(_attempt, group, tell), using=using)


def _require_outcome(events: Sequence[Prepared], wanted: str, call: str, hint: str = "") -> None:
    found = _outcomes(events)
    for event in events:
        if (outcome := found.get(event.event_id, OF_ANOTHER)) != wanted:
            raise FencedOut(
                f"The prepared event {event.event_id} cannot be {call}: its fence on "
                f"{event.using!r} says {outcome}.{hint}"
            )


def _outcomes(events: Sequence[Prepared]) -> dict[UUID, str]:
    """Ask the fences as the keeper does: in a session that sees no open transaction."""
    found: dict[UUID, str] = {}
    for (to, using), group in _by_keeper(events):
        asked = [
            Question(each.event_id, each.prepared_at, each.request.stream, each.request.type)
            for each in group
        ]
        found |= outcomes(asked, keeper=to, using=using)
    return found


def _tell_what_fences_say(events: Sequence[Prepared], *, wait: bool) -> None:
    try:
        found = _outcomes(events)
        for outcome, state in ((COMMITTED, State.CONFIRMED), (ROLLED_BACK, State.CANCELLED)):
            decided = [event for event in events if found.get(event.event_id) == outcome]
            _tell(decided, state, wait=wait)
    except Exception as error:  # the caller's own error is raised
        logger.warning("Fences gave no answer, so the keeper will ask error=%s", error)


def _by_keeper(events: Sequence[Prepared]) -> Iterable[tuple[tuple[str, str], list[Prepared]]]:
    groups: dict[tuple[str, str], list[Prepared]] = {}
    for event in events:
        groups.setdefault((event.to, event.using), []).append(event)
    return groups.items()


def _tell(events: Sequence[Prepared], state: str, *, wait: bool) -> None:
    for (to, using), group in _by_keeper(events):
        if wait or is_in_test(using):
            _tell_keeper(group, state, to, using)
        else:
            calls.send(_attempt, group, _tell_keeper, state, to, using)


def _attempt(events: Sequence[Prepared], call: Callable[..., None], *args: Any) -> None:
    """Make a call, and only log its error: the caller would take it for a failed commit."""
    try:
        call(events, *args)
    except SoftTimeLimitExceeded:  # of the task that this thread executes
        raise
    except Exception as error:
        answered = isinstance(error, PreparedError)
        if answered and not isinstance(error, KeeperUnavailable):
            logger.error("The keeper did not decide as told error=%s", error)
        else:
            logger.warning("The keeper was not told, so it will ask error=%s", error)


def _tell_keeper(events: Sequence[Prepared], state: str, to: str, using: str) -> None:
    keeper = keeper_of(to, using)
    answers = keeper.decide({event.event_id: state for event in events})
    if lost := [answer.event_id for answer in answers if answer.state == UNKNOWN]:
        # The keeper's database was restored to a time before: record the events again.
        requests = {event.event_id: event.request for event in events}
        again = keeper.prepare([requests[id] for id in lost])
        recorded = [answer.event_id for answer in again if answer.state == State.PREPARED]
        answers = [answer for answer in answers if answer.event_id not in lost]
        # Or it was confirmed so long ago that the keeper has pruned its decision.
        answers += [answer for answer in again if answer.state != State.PREPARED]
        answers += keeper.decide(dict.fromkeys(recorded, state))
    for answer in answers:
        if answer.state == CONTRADICTION:
            raise Contradiction(
                answer.detail
                or f"The prepared event {answer.event_id} was decided otherwise at the keeper "
                f"{to!r}, so it cannot be {state}. Nothing was changed."
            )
        if answer.state != state:
            error = UnknownPrepared if answer.state == UNKNOWN else PreparedError
            detail = answer.detail or "the log of the keeper says why"
            raise error(f"{answer.event_id} is {answer.state}: {detail}")


@cache
def _warn_once(alias: str) -> None:
    logger.warning(
        "prepare() was called in a transaction, which stays open while the keeper is asked; "
        "prepare before the transaction begins database=%s",
        alias,
    )


aprepare = sync_to_async(prepare)
aprepare_many = sync_to_async(prepare_many)
aconfirm = sync_to_async(confirm)
acancel = sync_to_async(cancel)
