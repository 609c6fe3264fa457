"""Gaps, looked at and decided on by a person.

Skipping one is final: the stream goes on behind the versions that are missing, with the name of who
decided and why in its row. What comes of them later is dropped. The reader that holds the stream
notices by itself. Nobody waits for a gap that an audit has found: skipping it accepts it, and later
audits leave it out. Permission is the caller's business (``outbox_app.skip_gap``).
"""

from __future__ import annotations

from typing import Any

from django.db import transaction
from django.db.models import QuerySet

from ..exceptions import GapNotSkippable
from ..models import DatabaseNow, Gap, ParkedStream
from ..text import get_logger

logger = get_logger("outbox_app.subscriptions")


def list_gaps(
    *, using: str, subscription: str | None = None, state: str | None = Gap.State.OPEN
) -> QuerySet[Gap]:
    """Return gaps, the oldest first.

    Args:
        using: Database alias.
        subscription: Only those of one subscription.
        state: Only those in this state; None: in any. Default: those that are open.
    """
    gaps = Gap.objects.using(using).order_by("seen_at", "id")
    if subscription is not None:
        gaps = gaps.filter(subscription=subscription)
    return gaps if state is None else gaps.filter(state=state)


def skip_gap(gap_id: int, *, by: str, reason: str, using: str) -> Gap:
    """Give up the versions of a gap: its stream goes on behind them, or an audit accepts it.

    Args:
        gap_id: Id of the row.
        by: Who decided.
        reason: Why.
        using: Database alias.

    Returns:
        The row as it is now.

    Raises:
        GapNotSkippable: There is no such gap, it is settled, or its reader does not wait for it; or
            name or reason are missing. Nothing was changed.
    """
    if not by.strip() or not reason.strip():
        raise GapNotSkippable("Skipping a gap takes a name and a reason; both are kept with it.")
    with transaction.atomic(using=using):
        gap = Gap.objects.using(using).filter(pk=gap_id).first()
        if gap is None:
            raise GapNotSkippable(f"There is no gap {gap_id} on {using!r}.")
        if gap.kind != Gap.Kind.VERSION:
            raise GapNotSkippable(
                f"Gap {gap_id} is one of positions: nothing waits for it. It is closed by itself."
            )
        # The stream first, then the gap: as its reader does, which may be filling it right now.
        parked = ParkedStream.objects.using(using).filter(
            subscription=gap.subscription, log=gap.log, stream=gap.stream
        )
        moved = parked.filter(version__range=(gap.first, gap.last)).update(
            version=gap.last + 1, released=True
        )
        settled = (
            Gap.objects.using(using)
            .filter(pk=gap_id, state=Gap.State.OPEN, first=gap.first, last=gap.last)
            .update(
                state=Gap.State.SKIPPED,
                settled_at=DatabaseNow(),
                settled_by=by[:255],
                reason=reason,
            )
        )
        if not settled or (gap.subscription and not moved):
            gap.refresh_from_db(using=using)
            raise GapNotSkippable(
                f"Gap {gap_id} is {gap.get_state_display()}, or was changed at this moment. Look "
                "at it again."
            )
        gap.refresh_from_db(using=using)
    logger.warning("Gap skipped database=%s gap=%s by=%s", using, gap, by)
    return gap


def record_skip(
    name: str,
    log: str,
    first: int,
    last: int,
    *,
    by: str,
    reason: str,
    using: str,
    partition: int = 0,
    stream: str = "",
) -> Gap:
    """Write down, in the open transaction, that a person has a subscription skip events of a log.

    The row was never open. A second decision about the same place is written above the first.

    Args:
        name: The subscription.
        log: Table of the log.
        first, last: Positions of the events, both included.
        by, reason: Who decided, and why.
        using: Database alias.
        partition, stream: Of the events, where all are of one.
    """
    key: dict[str, Any] = {
        "kind": Gap.Kind.EVENT,
        "subscription": name,
        "partition": partition,
        "log": log,
        "stream": stream,
        "first": first,
    }
    gaps = Gap.objects.using(using)
    if before := gaps.filter(**key).first():
        reason = f"{reason}\nBefore, to {before.last}, by {before.settled_by}: {before.reason}"
    gap, _ = gaps.update_or_create(
        **key,
        defaults={
            "state": Gap.State.SKIPPED,
            "last": last,
            "settled_at": DatabaseNow(),
            "settled_by": by[:255],
            "reason": reason[:10_000],
        },
    )
    logger.warning("Events skipped subscription=%s gap=%s by=%s", name, gap, by)
    return gap
