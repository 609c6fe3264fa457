"""Records the missing versions that an audit finds as rows of ``outbox_gap``.

These rows have no subscription. A gap is settled only when the log has its versions, or by a larger
gap. Gaps that a person has skipped are accepted: the next audit leaves these ``accepted_gaps`` out.
Each row is updated only from the state that was read: a decision taken meanwhile stands.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from django.db.models import F

from ...models import EventLog, Gap
from ...models.gap import GapQuerySet
from ..defects import MISSING, Audit

#: How many gaps of one audit are recorded; more rows add no information.
LIMIT = 10_000
_BATCH = 1000

#: The last missing version, by stream and first.
Found = dict[tuple[str, int], int]


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
    """Record missing versions as gaps, and settle gaps whose versions are not missing any more.

    With ``whole`` the defects are all that the log and its archive lack, so any other gap was
    filled. Without it a query of the log decides whether a gap was filled.
    """
    missing = [defect for defect in result.defects if defect.kind in MISSING]
    found: Found = {(each.stream, each.first or 0): each.last or 0 for each in missing[:LIMIT]}
    left_out = sum(result.counts.get(kind, 0) for kind in MISSING) - len(found)
    known = {(gap.stream, gap.first): gap for gap in _rows(log, using).iterator()}
    new, unchanged, written = [], [], 0
    for (stream, first), last in found.items():
        gap = known.get((stream, first))
        if gap is None:
            given = {"stream": stream, "first": first, "last": last}
            new.append(Gap(kind=Gap.Kind.VERSION, log=log._meta.db_table, **given))
        elif gap.state == Gap.State.OPEN and gap.last == last:
            unchanged.append(gap.pk)
        elif gap.state != Gap.State.SKIPPED or gap.last < last:
            written += _unchanged(gap, using).update(last=last, **Gap.UNSETTLED)
    # Two audits at the same time insert the same rows.
    Gap.objects.using(using).bulk_create(new, batch_size=_BATCH, ignore_conflicts=True)
    for start in range(0, len(unchanged), _BATCH):
        rows = Gap.objects.using(using).filter(pk__in=unchanged[start : start + _BATCH])
        rows.update(attempts=F("attempts") + 1)
    others = [gap for key, gap in known.items() if gap.state == Gap.State.OPEN and key not in found]
    filled = _settle(others, found, log, using, whole=whole and not left_out)
    return Recorded(written + len(new), len(unchanged), filled, left_out)


def _settle(
    gaps: Sequence[Gap], found: Found, log: type[EventLog], using: str, *, whole: bool
) -> int:
    """Settle open gaps that were not found again, if the log or a larger gap explains that."""
    runs: dict[str, list[tuple[int, int]]] = {}
    for (stream, first), last in found.items():
        runs.setdefault(stream, []).append((first, last))
    filled = 0
    for gap in gaps:
        around = runs.get(gap.stream, [])
        larger = [run for run in around if run[0] < gap.first <= run[1]]
        # Its later versions that are still missing were recorded as other gaps.
        last = min([gap.last, *(first - 1 for first, _ in around if first > gap.first)])
        if larger:
            reason = f"Now part of a larger gap: versions {larger[0][0]} to {larger[0][1]}."
            _unchanged(gap, using).settle(Gap.State.CLOSED, reason=reason)
        elif whole or _there(gap.stream, gap.first, last, log, using):
            filled += _unchanged(gap, using).settle(Gap.State.FILLED, last=last)
    return filled


def _there(stream: str, first: int, last: int, log: type[EventLog], using: str) -> bool:
    rows = log._base_manager.using(using).filter(stream=stream, version__range=(first, last))
    return bool(rows.values("version").distinct().count() == last - first + 1)


def _unchanged(gap: Gap, using: str) -> GapQuerySet:
    return Gap.objects.using(using).filter(pk=gap.pk, state=gap.state, last=gap.last)


def _rows(log: type[EventLog], using: str) -> Any:
    gaps = Gap.objects.using(using).filter(kind=Gap.Kind.VERSION, subscription="")
    return gaps.filter(log=log._meta.db_table)
