"""One attempt at a page: the handler's call, and the search for the event at which it fails.

The search halves the page: each half is a shorter page, committed with the cursor, so its effects
are as exact as those of a whole page. A handler that fails only for a combination of events gets
past it. An event that fails alone is kept on the cursor, with its traceback, and is tried alone
until it succeeds or a person skips it (``subscriptions.skips``).
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from inspect import isasyncgen, isawaitable, iscoroutine, isgenerator
from typing import Any, NamedTuple

from django.db import connections

from ...database.transaction_guard import SwallowedError, guarded
from ...exceptions import OutboxError, TransactionEnded
from ...failpoints import failpoint
from ...jobs.staging.detector import watching_callbacks
from ...process.endings import ends_process
from ...process.tracing import inside, start_span
from ..exceptions import LogSetBack
from ..log.record import RecordedEvent
from .subscriber import Handler, Subscriber


class EndedByHandler(OutboxError):
    """A handler raised an exception that would end the process, and its other subscriptions."""


class HandlingResult(NamedTuple):
    #: Rows that were read.
    rows: int = 0
    #: Whether more rows may follow right away.
    more: bool = False
    error: Exception | None = None
    #: The events that the handler was given.
    events: list[RecordedEvent] = []


def call_handler(subscriber: Subscriber, events: list[RecordedEvent], *, using: str) -> None:
    """Call the handler inside the open transaction, which it cannot end unnoticed."""
    name = subscriber.name
    what = f"The handler of {name!r}"
    with guarded(what, using=using), watching_callbacks(what, using=using):
        connection = connections[using]
        blocks, savepoints = len(connection.atomic_blocks), len(connection.savepoint_ids)
        attributes = {"outbox.subscription": name, "messaging.batch.message_count": len(events)}
        carriers = (event.metadata for event in events)
        try:
            with inside(
                start_span("outbox handle", carriers, kind="CONSUMER", attributes=attributes)
            ):
                result = subscriber.handle(list(events))  # a copy: the handler may empty it
            _require_run(name, result)
        except BaseException as error:
            if len(connection.savepoint_ids) > savepoints:
                # The error's frames hold a generator inside atomic(). Left alone, it would leave
                # that block later, in the middle of our transaction.
                traceback.clear_frames(error.__traceback__)
            # Wrap SystemExit, and the panic of a library in Rust.
            if not (ends_process(error) or isinstance(error, Exception)):
                raise EndedByHandler(
                    f"The handler of {name!r} raised {error!r}, which ends only its page. Catch it "
                    "where it is raised."
                ) from error
            if isinstance(error, LogSetBack):  # of another log: this cursor would wait for a replay
                raise OutboxError(f"The handler of {name!r} raised {error!r}.") from error
            raise
        finally:
            left = len(connection.savepoint_ids) > savepoints
            # Otherwise Django would take the end of our transaction for the end of that block.
            del connection.savepoint_ids[savepoints:], connection.atomic_blocks[blocks:]
        if left:
            raise SwallowedError(
                f"The handler of {name!r} has entered atomic() and not left it, as an unfinished "
                "generator does. The effects of the handler were rolled back."
            )
        failpoint("handled")


def _require_run(name: str, result: Any) -> None:
    """Refuse a handler that returned a coroutine or a generator: its body has not run."""
    if isawaitable(result) or isgenerator(result) or isasyncgen(result):
        if iscoroutine(result):
            result.close()
        raise SwallowedError(
            f"The handler of {name!r} has returned {result!r:.200}, which was not run. Write a "
            "plain function, or run it in the handler."
        )


def raising(error: Exception) -> Handler:
    """Return a handler that raises an error that is known already."""

    def handle(events: list[RecordedEvent]) -> None:
        raise error

    return handle


def narrowed(tried: HandlingResult, attempt: Callable[[int], HandlingResult]) -> HandlingResult:
    """Return the attempt at the event that fails, or the last attempt if the whole page succeeds.

    ``attempt`` tries a page of at most so many rows, from where the cursor is by then.
    """
    left = tried.rows
    # If the handler has ended its transaction, nothing is tried again.
    while left > 0 and not isinstance(tried.error, TransactionEnded):
        size = max(1, left // 2)
        tried = attempt(size)
        failed = tried.error is not None  # an error with a length may count as false
        if failed and (size == 1 or not tried.rows):
            break
        if not (failed or tried.rows or tried.more):
            break
        left = size if failed else left - tried.rows  # rows is 0 if none was wanted
    return tried


def decided(failed: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """Yield the events in a cursor's ``failed_event`` that a person has decided to skip."""
    while failed:
        if failed.get("skip"):
            yield failed
        failed = failed.get("behind")


def joined(events: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the first of these events as a ``failed_event``, with the others behind it."""
    return {**events[0], "behind": joined(events[1:])} if events else None
