"""Events that a person gives up: one that fails, or all that a parked stream has missed.

Each takes a name and a reason, and leaves a row in ``Gap`` of the kind ``event``. The process that
runs the subscription goes on by itself. Permission is the caller's business
(``outbox_app.skip_event``).
"""

from __future__ import annotations

from typing import Any

from django.db.models import F, Max

from ..eventlog.reader import LogReader, reads_by_time
from ..eventlog.registry import log_named
from ..exceptions import GapNotSkippable
from ..models import Cursor, Gap, ParkedStream
from .control import alias_of, locked
from .delivered import note
from .gaps import record_skip


def skip_event(
    name: str,
    position: int,
    *,
    by: str,
    reason: str,
    log: str | None = None,
    using: str | None = None,
) -> Gap:
    """Give up the event that a subscription, or a parked stream of it, fails at.

    Its handler does not get the event any more; what follows is handled.

    Args:
        name: The subscription.
        position: Of the event.
        by, reason: Who decided, and why.
        log: Table of the log, where it reads several.
        using: Database alias. Default: that of its logs.

    Returns:
        The row that says so.

    Raises:
        GapNotSkippable: It does not fail at that event, or name or reason are missing. Nothing was
            changed.
        ReplayRefused: A page that is being handled does not end. Nothing was changed.
    """
    _require(by, reason)
    using = using or alias_of(name)
    with locked(name, using) as (_, cursors):
        parked = ParkedStream.objects.using(using).filter(
            subscription=name, position=position, failed_event__isnull=False
        )
        found: list[Any] = [*cursors, *parked]
        for each in found:
            failed = each.failed_event
            if not failed or failed["position"] != position or log not in (None, each.log):
                continue
            rows = type(each)._default_manager.using(using).filter(pk=each.pk)
            if isinstance(each, Cursor):  # the owner passes it, in the transaction of its place
                rows.update(
                    failed_event={**failed, "skip": True},
                    revision=F("revision") + 1,
                    error="",
                    failures=0,
                    retry_at=None,
                )
            elif not rows.filter(version=each.version).update(
                version=F("version") + 1, position=position + 1, released=True, failed_event=None
            ):
                continue
            return record_skip(
                name,
                each.log,
                position,
                position,
                by=by,
                reason=reason,
                using=using,
                partition=each.partition,
                stream=failed["stream"],
            )
    raise GapNotSkippable(
        f"Subscription {name!r} does not fail at position {position}. The list of subscriptions "
        "names the event, after the second attempt."
    )


def discard_stream(
    name: str,
    stream: str,
    *,
    by: str,
    reason: str,
    log: str | None = None,
    using: str | None = None,
) -> Gap:
    """Give up what a parked stream has missed by now; what its cursor comes to later is handled.

    Arguments, result and errors: as ``skip_event``.
    """
    _require(by, reason)
    using = using or alias_of(name)
    with locked(name, using) as (_, cursors):
        rows = ParkedStream.objects.using(using).filter(subscription=name, stream=stream)
        parked = (rows if log is None else rows.filter(log=log)).order_by("pk").first()
        if parked is None:
            raise GapNotSkippable(
                f"Subscription {name!r} has not parked the stream {stream!r:.300}."
            )
        if Gap.objects.using(using).filter(
            subscription=name, log=parked.log, stream=stream, state=Gap.State.OPEN
        ):
            raise GapNotSkippable(f"{parked} waits for versions that are missing: skip its gap.")
        key = (parked.log, parked.partition)
        cursor = next((each for each in cursors if (each.log, each.partition) == key), None)
        if cursor is None:
            raise GapNotSkippable(
                f"No cursor of {name!r} reads {parked.log}, so nothing comes of it."
            )
        by_time = reads_by_time(cursor.state)
        reader = LogReader(log_named(parked.log), using=using, by_time=by_time)
        state = reader.load(cursor.state)
        missed = reader.log._default_manager.using(using).filter(
            stream=stream, version__gte=parked.version
        )
        missed = missed.extra(where=[f"NOT ({reader.window.unread(state)})"])
        ends = missed.aggregate(Max("id"), Max("version"))
        last = max(ends["id__max"] or 0, parked.position)
        if ends["version__max"]:
            note(name, parked.log, state, {stream: ends["version__max"]}, using=using)
        parked.delete(using=using)
        # Whoever holds a page that leaves the stream out has to read it anew.
        Cursor.objects.using(using).filter(pk=cursor.pk).update(revision=F("revision") + 1)
        return record_skip(
            name,
            parked.log,
            parked.position,
            last,
            by=by,
            reason=f"Discarded, from version {parked.version} on. {reason}",
            partition=parked.partition,
            stream=stream,
            using=using,
        )


def _require(by: str, reason: str) -> None:
    if not by.strip() or not reason.strip():
        raise GapNotSkippable("Skipping an event takes a name and a reason; both are kept.")
