"""Events that a person has a subscription skip: each decision leaves a row in ``Gap``.

Such a row is of the kind ``event``, goes by positions, and was never open. A second decision about
the same place is written above the first in one row. Permission is the caller's business
(``outbox_app.skip_event``, for a move ahead ``outbox_app.replay_subscription``).
"""

from __future__ import annotations

from typing import Any

from ..models import DatabaseNow, Gap
from ..text import get_logger

logger = get_logger("outbox_app.subscriptions")


def record(
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
    """Write down, in the open transaction, that a subscription skips events of a log.

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
