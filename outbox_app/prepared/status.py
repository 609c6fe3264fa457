"""The facts about prepared events that status, diagnosis, metrics and the overview show.

The number of statements is fixed. Counting stops at ``counting.MANY``. Due events and silent
senders are read from the oldest ``SAMPLE`` prepared events, which were asked about most often.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from django.db.models.functions import Left

from ..database.clock import DatabaseNow
from ..models import Incident, Process, counting
from ..process.lease import alive
from .fences import IN_PROGRESS, TOO_OLD
from .models import PreparedEvent

SAMPLE = 1000
#: A sender is silent after it has not answered so many questions about an event.
SILENT = 3
#: How many characters of the last answer are shown.
ANSWER = 300


@dataclass(slots=True)
class SilentSender:
    sender: str
    #: Its events, the age of the oldest, and why it gave no answer.
    events: int
    oldest_seconds: float
    last_answer: str


@dataclass(frozen=True, slots=True)
class PreparedStatus:
    #: How many events are prepared, and undecided, counted up to counting.MANY.
    prepared: int
    undecided: int
    #: The age of the oldest prepared event; 0 if there is none.
    oldest_seconds: float
    #: How many events of the sample are due for a question.
    due: int
    #: Running processes of the check-back.
    processes: int
    #: Contradictions of the last 24 hours, counted up to counting.MANY.
    contradictions: int
    silent: list[SilentSender]


def prepared_status(*, using: str) -> PreparedStatus | None:
    """Return the facts of a keeper; None if there is no prepared event at all."""
    events = PreparedEvent.objects.using(using)
    if not events.exists():
        return None
    prepared = events.filter(state=PreparedEvent.State.PREPARED)
    columns = ("sender", "prepared_at", "next_check_at", "unreachable", "answer", "now")
    answer = Left("last_answer", ANSWER)
    oldest = prepared.order_by("prepared_at").annotate(answer=answer, now=DatabaseNow())
    due, age, silent = 0, 0.0, dict[str, SilentSender]()
    for sender, at, next_check_at, unreachable, last, now in oldest.values_list(*columns)[:SAMPLE]:
        seconds = max(0.0, (now - at).total_seconds())
        age = max(age, seconds)
        due += next_check_at is not None and next_check_at <= now
        if unreachable >= SILENT and last not in (IN_PROGRESS, TOO_OLD):
            each = silent.setdefault(sender, SilentSender(sender, 0, seconds, last))
            each.events += 1
    since = DatabaseNow() - timedelta(days=1)
    incidents = Incident.objects.using(using).filter(created_at__gte=since)
    return PreparedStatus(
        prepared=counting.counted(prepared),
        undecided=counting.counted(events.filter(state=PreparedEvent.State.UNDECIDED)),
        oldest_seconds=age,
        due=due,
        processes=len(alive(Process.objects.using(using).filter(resource="prepared"))),
        contradictions=counting.counted(incidents.filter(kind=Incident.Kind.CONTRADICTION)),
        silent=list(silent.values()),
    )
