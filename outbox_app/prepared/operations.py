"""Operations on prepared events for people: ask the senders, decide, give more time.

The keeper makes these decisions, like all others. An event that was decided meanwhile stays as it
is. Each decision is stored with the person's name and the reason.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from datetime import timedelta
from itertools import groupby
from uuid import UUID

from django.db.models import F
from django.db.models.functions import Greatest

from ..database.clock import DatabaseNow
from ..database.encoding import replaced
from ..models.counting import LISTED
from ..text import Write, get_logger
from . import keeper
from .checking_back import DECIDES
from .conf import prepared_settings
from .fences import outcomes
from .models import PreparedEvent, PreparedEventQuerySet
from .request import DECIDE_BY, MOST_SKIPPED

logger = get_logger("outbox_app.prepared")

State = PreparedEvent.State
#: How many events one transaction decides.
BATCH_SIZE = 500


def selected(
    *,
    using: str,
    ids: Collection[UUID] = (),
    sender: str | None = None,
    state: str | None = None,
) -> PreparedEventQuerySet:
    """Return the events that match all given conditions, the oldest first."""
    wanted = {"event_id__in": list(ids), "sender": sender, "state": state}
    conditions = {name: value for name, value in wanted.items() if value}
    return PreparedEvent.objects.using(using).filter(**conditions).order_by("prepared_at")


def check(events: PreparedEventQuerySet) -> int:
    """Let the processes of the check-back ask about events now; return about how many events."""
    return events.open().order_by().update(next_check_at=DatabaseNow())


def extend(events: PreparedEventQuerySet, *, by: str, reason: str) -> int:
    """Give senders another day from now; return about how many events that changes.

    Undecided events become prepared again. It never makes the time of an event shorter.
    """
    seconds = min(DECIDE_BY, prepared_settings().PREPARED_MAX_DECIDE_BY)
    rows = events.open().order_by()
    count = rows.update(
        state=State.PREPARED,
        decide_by=Greatest(F("decide_by"), DatabaseNow() + timedelta(seconds=seconds)),
        next_check_at=DatabaseNow(),
        reason=replaced(f"Extended by {by}: {reason}", using=rows.db)[:10_000],
    )
    logger.warning("Prepared events extended events=%d by=%s reason=%s", count, by, reason)
    return count


def answer(name: str, *, write: Write = logger.info) -> Counter[str]:
    """Fetch this sender's open events from a keeper, and send it the outcomes of their fences.

    For a sender that no keeper can call. The keeper leaves out events that are immune still. It
    ends after ``MOST_SKIPPED`` events that stay open.

    Returns:
        How many events were confirmed, cancelled, left open, and decided otherwise before.
    """
    from ..door.peers import KEEPER, peer_named
    from .remote import HttpKeeper  # needs the extra door

    using = peer_named(name, KEEPER).database
    there = HttpKeeper(name, using)
    done = Counter(dict.fromkeys([*DECIDES.values(), keeper.CONTRADICTION, "open"], 0))
    while done["open"] <= MOST_SKIPPED and (found := there.open(skip=done["open"])):
        found_out = outcomes(found, keeper=name, using=using)
        answers = there.decide({id: DECIDES[o] for id, o in found_out.items() if o in DECIDES})
        ended = Counter(each.state for each in answers if each.state in done)
        done.update(ended, open=len(found) - ended.total())
        figures = " ".join(f"{state}={count}" for state, count in done.items())
        write(f"answered keeper={name} {figures}")
    return done


def decide(
    events: PreparedEventQuerySet,
    state: str,
    *,
    by: str,
    reason: str,
    write: Write = logger.info,
) -> tuple[int, list[str]]:
    """Confirm or cancel the open events among these, in batches.

    Return how many were decided, and why the others were not, for at most ``LISTED`` of them.
    """
    by = f"{by} (a person)" if by in keeper.ROUTES else by
    chosen = list(events.open().order_by("sender", "pk").values_list("sender", "event_id"))
    count, failed = 0, []
    for sender, pairs in groupby(chosen, key=lambda pair: pair[0]):
        ids = [event_id for _, event_id in pairs]
        for first in range(0, len(ids), BATCH_SIZE):
            batch = dict.fromkeys(ids[first : first + BATCH_SIZE], state)
            answers = keeper.decide(sender, batch, by=by, reason=reason, using=events.db)
            done = sum(answer.state == state for answer in answers)
            count += done
            failed += [f"{a.event_id}: {a.detail}" for a in answers if a.state != state]
            write(f"{state} sender={sender} events={done} total={count}/{len(chosen)}")
    return count, failed[:LISTED]
