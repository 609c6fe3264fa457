"""Push: the writer applies its own events to the projections that ask for it.

It runs right after the commit, in the same process. It cannot harm the writer: it waits for a lock
for a second at most, and only logs its errors. The pull applies the events that it leaves out, and
those from before the projection was added. It reads the events back from the log, so that it sees
what the pull sees.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any
from uuid import UUID

from django.db import transaction
from django.db.models import OuterRef, Subquery

from ...database.callbacks import keep_callbacks_apart
from ...database.lock_wait import atomic_with_lock_wait
from ...database.transaction_guard import after_the_commit, guarded
from ...failpoints import failpoint
from ...text import get_logger
from ..log.filter import EventFilter
from ..log.record import recorded
from ..models import EventLog
from ..subscriptions.subscriber import Subscriber, all_subscribers
from .rows import PendingEvent, ProjectionTable

logger = get_logger("outbox_app.events.projections")

#: Seconds that a push waits for a lock.
LOCK_WAIT = 1
#: How many events one statement reads.
CHUNK = 500


def receive(
    sender: type[EventLog], *, using: str, events: Sequence[EventLog], **kwargs: Any
) -> None:
    """Push events that were just written, once their transaction has committed."""
    for each in all_subscribers():
        # Any other handler may have a method of this name.
        if getattr(each.handle, "push", False) is not True:
            continue
        if each.fault or using != each.using or sender not in each.logs:
            continue
        only = EventFilter(each.topics, each.types)
        ids = [event.message_id for event in events if only.matches(event.topic, event.type)]
        if ids:
            transaction.on_commit(partial(_push, each, sender, ids), using=using)


def pending_events(
    subscriber: Subscriber, log: type[EventLog], ids: Sequence[UUID]
) -> Iterator[PendingEvent]:
    """Read events back; yield each with the version before it that the subscription asks for."""
    rows = log._base_manager.using(subscriber.using)
    condition, params = EventFilter(subscriber.topics, subscriber.types).sql()
    earlier = rows.filter(stream=OuterRef("stream"), version__lt=OuterRef("version"))
    if condition:
        # The same SQL as the pull, so that a pattern like "order.*" matches the same types.
        earlier = earlier.extra(where=[condition], params=params)
    previous = Subquery(earlier.order_by("-version").values("version")[:1])
    for start in range(0, len(ids), CHUNK):
        chunk = rows.filter(message_id__in=ids[start : start + CHUNK])
        for row in chunk.annotate(previous=previous).order_by("stream", "version"):
            yield PendingEvent(recorded(row), row.previous or 0)


def _push(subscriber: Subscriber, log: type[EventLog], ids: Sequence[UUID]) -> None:
    projection: Any = subscriber.handle
    text = "Push left to the pull subscription=%s events=%d error=%s"
    tell = partial(logger.warning, text, subscriber.name, len(ids))
    with after_the_commit(tell, using=subscriber.using):
        failpoint("push")
        pending = list(pending_events(subscriber, log, ids))
        with atomic_with_lock_wait(LOCK_WAIT, using=subscriber.using):
            with guarded(f"The projection {subscriber.name!r}", using=subscriber.using):
                ProjectionTable(projection, using=subscriber.using).apply(pending)
            of = f"the projection {subscriber.name!r}"
            after = keep_callbacks_apart(subscriber.using, of=of)
        for limit in after.limits:
            raise limit
