"""Records the missing versions that an audit finds as rows of ``outbox_gap``.

These rows have no subscription. A gap is settled only when all of its versions are there. Gaps that
a person has skipped are accepted: the next audit leaves these ``accepted_gaps`` out. A skip for a
subscription writes such a row, too; a subscription that skips by itself (``on_gap="skip"``) does
not: a person should see these.
Each row is updated only from the state that was read: a decision taken meanwhile stands.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from ...events.models import EventLog, Gap
from ...events.models.gap import GapQuerySet
from ..defects import MISSING, Audit

#: How many gaps of one audit are recorded; more rows add no information.
LIMIT = 10_000
_BATCH = 1000


class Recorded(NamedTuple):
    #: Gaps that are new, or have grown, or are open again.
    written: int
    #: Open gaps that an earlier audit has recorded.
    unchanged: int
    #: Gaps whose versions are there now.
    filled: int
    #: Gaps that were too many.
    left_out: int

    def __str__(self) -> str:
        text = f"gaps written={self.written} unchanged={self.unchanged} filled={self.filled}"
        return f"{text} left_out={self.left_out}" if self.left_out else text


def accepted_gaps(log: type[EventLog], *, using: str) -> list[tuple[str, int, int]]:
    rows = _rows(log, using).filter(state=Gap.State.SKIPPED)
    return list(rows.values_list("stream", "first", "last"))


def record(result: Audit, *, log: type[EventLog], using: str, whole: bool = False) -> Recorded:
    """Record missing versions as gaps, and settle gaps all of whose versions are in the log.

    With ``whole`` log and archive lack nothing, so every other gap was filled.
    """
    missing = [defect for defect in result.defects if defect.kind in MISSING]
    found = {(each.stream, each.first or 0): each.last or 0 for each in missing[:LIMIT]}
    left_out = sum(result.counts.get(kind, 0) for kind in MISSING) - len(found)
    known = {(gap.stream, gap.first): gap for gap in _rows(log, using).iterator()}
    new, written, unchanged = [], 0, 0
    for (stream, first), last in found.items():
        gap = known.get((stream, first))
        if gap is None:
            versions = {"stream": stream, "first": first, "last": last}
            new.append(Gap(kind=Gap.Kind.VERSION, log=log._meta.db_table, **versions))
        elif gap.state == Gap.State.OPEN and gap.last == last:
            unchanged += 1
        elif gap.state != Gap.State.SKIPPED or gap.last < last:
            written += _unchanged(gap, using).update(last=last, **Gap.UNSETTLED)
    # Two audits at the same time insert the same rows.
    Gap.objects.using(using).bulk_create(new, batch_size=_BATCH, ignore_conflicts=True)
    filled = sum(
        _unchanged(gap, using).settle(Gap.State.FILLED)
        for key, gap in known.items()
        if gap.state == Gap.State.OPEN and key not in found and (whole or _there(gap, log, using))
    )
    return Recorded(written + len(new), unchanged, filled, left_out)


def _there(gap: Gap, log: type[EventLog], using: str) -> bool:
    rows = log._base_manager.using(using).filter(stream=gap.stream)
    rows = rows.filter(version__range=(gap.first, gap.last))
    return bool(rows.values("version").distinct().count() == gap.last - gap.first + 1)


def _unchanged(gap: Gap, using: str) -> GapQuerySet:
    return Gap.objects.using(using).filter(pk=gap.pk, state=gap.state, last=gap.last)


def _rows(log: type[EventLog], using: str) -> Any:
    gaps = Gap.objects.using(using).filter(kind=Gap.Kind.VERSION, subscription="")
    return gaps.filter(log=log._meta.db_table)
