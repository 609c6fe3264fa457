"""Skips by a person: of a gap, a failing event, or all events that a parked stream has missed.

Each skip takes a name and a reason, which are kept in a row of ``Gap``, and is final: versions that
arrive later are dropped. The process that runs the subscription continues by itself. A gap that an
audit has found blocks no stream: a skip accepts it, and later audits leave it out. They also leave
out a gap that a person has skipped for a subscription. The caller checks the permission
(``outbox_events.skip_gap``, ``outbox_events.skip_event``).
"""

from __future__ import annotations

from django.db import transaction
from django.db.models import Max

from ...text import get_logger
from ..exceptions import GapNotSkippable
from ..models import Cursor, Gap, ParkedStream
from .control import alias_of, locked, record_skip
from .cursors import reader_of
from .version_gaps import give_up, record_versions

logger = get_logger("outbox_app.events.subscriptions")


def skip_gap(gap_id: int, *, by: str, reason: str, using: str) -> Gap:
    """Skip the versions of a gap: its stream continues after them, or audits accept the gap.

    ``by`` says who decided, ``reason`` why. Returns the row as it is now.

    Raises:
        GapNotSkippable: There is no such gap, it is settled, or its reader does not wait for it; or
            the name or the reason is missing. Nothing was changed.
    """
    _require(by, reason, "Skipping a gap requires a name and a reason; both are stored.")
    with transaction.atomic(using=using):
        gap = Gap.objects.using(using).filter(pk=gap_id).first()
        if gap is None:
            raise GapNotSkippable(f"There is no gap {gap_id} on {using!r}.")
        if gap.kind != Gap.Kind.VERSION:
            raise GapNotSkippable(
                f"Gap {gap_id} is a gap of positions, for which no stream waits. It closes itself."
            )
        settled = give_up(gap, by=by, reason=reason, using=using)
        gap.refresh_from_db(using=using)
        if not settled:
            raise GapNotSkippable(
                f"Gap {gap_id} is {gap.get_state_display()}, or another transaction has just "
                "changed it. Look at it again."
            )
        if gap.subscription:
            Gap.objects.using(using).accept_missing(gap, by=by, reason=reason)
    logger.warning("Gap skipped database=%s gap=%s by=%s", using, gap, by)
    return gap


def skip_event(
    name: str,
    position: int,
    *,
    by: str,
    reason: str,
    log: str | None = None,
    using: str | None = None,
) -> Gap:
    """Skip the event at which a subscription, or one of its parked streams, fails.

    The handler does not get the event again; later events are handled. ``by`` says who decided,
    ``reason`` why. If the subscription reads several logs, ``log`` is the table of the event's log.
    ``using`` is by default the alias of its logs. Returns the row that records the decision.

    Raises:
        GapNotSkippable: The subscription does not fail at that event, or the name or the reason is
            missing. Nothing was changed.
        ReplayRefused: A page that is being handled does not end. Nothing was changed.
        LogSetBack: The log was emptied, or restored alone, since. Nothing was changed.
    """
    _require(by, reason)
    using = using or alias_of(name)
    with locked(name, using) as (_, cursors):
        parked = ParkedStream.objects.using(using).filter(
            subscription=name, position=position, failed_event__isnull=False
        )
        found: list[Cursor | ParkedStream] = [*cursors, *parked]
        for each in found:
            failed = each.failed_event
            if not failed or failed["position"] != position or log not in (None, each.log):
                continue
            if isinstance(each, Cursor):  # its owner skips the event when it moves the cursor
                each.recall()
                rows = Cursor.objects.using(using).filter(pk=each.pk)
                rows.move(failed_event={**failed, "skip": True})
            elif not each.compare_and_set(
                version=each.version + 1, position=position + 1, released=True, failed_event=None
            ):
                continue
            return record_skip(
                subscription=name,
                partition=each.partition,
                log=each.log,
                stream=failed["stream"],
                first=position,
                last=position,
                by=by,
                reason=reason,
                using=using,
            )
        raise GapNotSkippable(
            f"Subscription {name!r} does not fail at position {position}. The list of "
            "subscriptions shows the failing event, after the second attempt."
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
    """Skip the events that a parked stream has missed by now; its later events are handled.

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
        gaps = Gap.objects.using(using).filter(subscription=name, log=parked.log, stream=stream)
        if gaps.open().exists():
            raise GapNotSkippable(f"{parked} waits for missing versions: skip its gap instead.")
        key = (parked.log, parked.partition)
        cursor = next((each for each in cursors if (each.log, each.partition) == key), None)
        if cursor is None:
            raise GapNotSkippable(
                f"No cursor of {name!r} reads {parked.log}, so there is no event to skip."
            )
        cursor.recall()
        reader = reader_of(cursor, using=using)
        state = reader.load(cursor.state)
        missed = reader.log._base_manager.using(using).filter(
            stream=stream, version__gte=parked.version
        )
        missed = missed.extra(where=[f"NOT ({reader.window.unread(state)})"])
        ends = missed.aggregate(Max("id"), Max("version"))
        if ends["version__max"]:
            record_versions(name, parked.log, state, {stream: ends["version__max"]}, using=using)
        parked.delete(using=using)
        # A process may hold a page from which it left out the stream: it has to read it again.
        Cursor.objects.using(using).filter(pk=cursor.pk).bump_revision()
        return record_skip(
            subscription=name,
            partition=parked.partition,
            log=parked.log,
            stream=stream,
            first=parked.position,
            last=max(ends["id__max"] or 0, parked.position),
            by=by,
            reason=f"Discarded, from version {parked.version} on. {reason}",
            using=using,
        )


def _require(
    by: str, reason: str, why: str = "Skipping an event requires a name and a reason."
) -> None:
    if not by.strip() or not reason.strip():
        raise GapNotSkippable(why)
