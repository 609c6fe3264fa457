"""Events in tests: assert published events, and run the subscriptions' handlers.

``run_subscribers()`` works inside the transaction of a ``TestCase``, whose uncommitted events a
real runner must not read. It takes events in the order of their ids, which is right as long as no
other process writes. A handler that raises fails the test.
"""

from __future__ import annotations

from typing import Any

from django.db import transaction

from ..aliases import model_alias
from ..testing.job import LISTED
from .log.filter import EventFilter
from .log.record import RecordedEvent, recorded
from .log.state import SqliteState
from .log.window import TOMBSTONE
from .models import Cursor, Event, EventLog
from .subscriptions.handling import call_handler
from .subscriptions.subscriber import Subscriber, all_subscribers, subscriber_named

__all__ = ["assert_published", "published_events", "run_subscribers"]

#: After so many rounds, handlers that publish events are assumed never to end.
ROUNDS = 100


def published_events(
    type: str | None = None,
    stream: str | None = None,
    *,
    log: type[EventLog] = Event,
    using: str | None = None,
) -> list[RecordedEvent]:
    """Return the events of a log, in the order in which they were published.

    Args:
        type, stream: Exact values. Default: all.
        log: The log.
        using: Database alias. Default: the log's.
    """
    wanted = {"type": type, "stream": stream}
    rows = log._base_manager.using(using or model_alias(log)).order_by("id")
    rows = rows.filter(**{name: value for name, value in wanted.items() if value is not None})
    return [recorded(row) for row in rows]


def assert_published(
    type: str,
    data: Any = None,
    *,
    stream: str | None = None,
    count: int = 1,
    log: type[EventLog] = Event,
    using: str | None = None,
) -> list[RecordedEvent]:
    """Assert that an event was published exactly ``count`` times.

    Args:
        type: Exact type.
        data: All of the event's data, as JSON holds it. Default: any.
        count: The expected number; 0: none.
        stream, log, using: As for ``published_events``.

    Returns:
        The events.

    Raises:
        AssertionError: There are more or fewer. The message lists the published events.
    """
    __tracebackhide__ = True  # pytest shows the test's line, not this one
    events = published_events(type, stream, log=log, using=using)
    found = [event for event in events if data in (None, event.data)]
    if len(found) != count:
        there = published_events(log=log, using=using)[:LISTED]
        lines = [f"  {e.type} {e.stream}@{e.version} {e.data!r}"[:200] for e in there]
        listed = "\n".join(["Published:", *lines]) if lines else "Nothing was published."
        raise AssertionError(f"Expected {count} published of {type}; found {len(found)}.\n{listed}")
    return found


def run_subscribers(*names: str) -> int:
    """Hand the events published so far to subscriptions, in this thread, until none is left.

    Events that the handlers publish are handled, too. The next call continues where this one ends.

    Args:
        *names: Names of subscriptions. Default: all.

    Returns:
        How many events were handled; one that two subscriptions handled counts twice.

    Raises:
        Exception: A handler raised it; its page is rolled back.
        UnknownSubscription: No subscription has this name.
        AssertionError: Handlers published events without end.
    """
    chosen = [subscriber_named(name) for name in names] if names else all_subscribers()
    handled = 0
    for _ in range(ROUNDS):
        new = sum(_handle(each, log) for each in chosen for log in each.logs)
        if not new:
            return handled
        handled += new
    raise AssertionError(f"There is no end after {ROUNDS} rounds and {handled} events.")


def _handle(subscriber: Subscriber, log: type[EventLog]) -> int:
    using = subscriber.using
    place = {"subscription": subscriber.name, "partition": 0, "log": log._meta.db_table}
    state = {"state": SqliteState().dump()}
    cursor, _ = Cursor.objects.using(using).get_or_create(**place, defaults=state)
    wanted = EventFilter(subscriber.topics, subscriber.types)
    rows = log._base_manager.using(using).filter(id__gt=cursor.position).order_by("id")
    rows = rows.exclude(type=TOMBSTONE)
    with transaction.atomic(using=using):
        events = [recorded(row) for row in rows if wanted.matches(row.topic, row.type)]
        if events:
            call_handler(subscriber, events, using=using)
            cursor.position = events[-1].id
            cursor.save(using=using, update_fields=["position"])
    return len(events)
