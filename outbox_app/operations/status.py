"""How the outbox is doing, from indexes only: nothing here counts or sorts a large table."""

from __future__ import annotations

from dataclasses import dataclass

from ..models import DatabaseNow, StagedJob

#: Counting stops here.
MANY = 100_000


@dataclass(frozen=True, slots=True)
class Backlog:
    """Jobs on their way."""

    #: Rows, counted up to MANY.
    rows: int
    #: Age of the oldest ready row, in seconds; 0 where there is none.
    oldest_seconds: float

    @property
    def shown(self) -> str:
        """The count for people: ``100000+`` where counting stopped."""
        return f"{MANY}+" if self.rows > MANY else str(self.rows)


def backlog(*, using: str) -> Backlog:
    """Return the backlog of the alias ``using``: ready rows only, held ones are not late."""
    ready = StagedJob.objects.using(using).filter(available_at=None)
    rows = ready.order_by()[: MANY + 1].count()
    oldest = (
        ready.order_by("id").annotate(now=DatabaseNow()).values_list("staged_at", "now").first()
    )
    age = (oldest[1] - oldest[0]).total_seconds() if oldest else 0.0
    return Backlog(rows=rows, oldest_seconds=max(0.0, age))
