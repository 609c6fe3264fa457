"""What a drainer has still to write about sent rows and incidents, kept through any failure.

A row that the broker took is deleted; a row with a receipt is marked as sent.

Until they are written the drainer reads nothing, gives up no shard and hands nothing back: a row
that was published must not be read again, and an extra publish must not happen before its incident
is written. If a drainer is killed, the incident of its shards' takeover covers what it had kept.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from django.db.models import Q, QuerySet

from ...database.clock import DatabaseNow
from ...models import Incident, StagedJob
from .batch import Row, delete, mark_sent
from .incidents import record_incident

#: Seconds to wait for workers that have a row locked, before each further try to mark it.
PAUSES = (0.01, 0.1)


class Unsettled:
    """Deletions, marks and incidents that one drainer has still to write."""

    def __init__(self, *, using: str) -> None:
        self.using = using
        self._published: list[tuple[int, str]] = []
        #: Those with a receipt.
        self._awaited: list[tuple[int, str]] = []
        self._incidents: list[dict[str, Any]] = []
        #: Published rows that cannot be settled, as another transaction has locked them: their ids,
        #: with their shards.
        self.locked: dict[int, int] = {}
        #: Rows sent since the last heartbeat: their shards, the first and the last id.
        self._shards: set[int] = set()
        self._span: list[int] = []

    def sent(self, rows: Sequence[Row]) -> None:
        """Settle, with the next flush, rows that the broker has taken.

        Note them until the next heartbeat: another drainer may own their shards by now.
        """
        self._published += [(row.id, row.task_id) for row in rows if row.receipt is None]
        self._awaited += [(row.id, row.task_id) for row in rows if row.receipt is not None]
        if rows:
            self._shards.update(row.shard for row in rows)
            ids = [*self._span, *(row.id for row in rows)]
            self._span = [min(ids), max(ids)]

    def record_unknown(self, rows: Sequence[Row], *, drainer: str, detail: str) -> None:
        """Record an incident with the next flush: the broker may have taken these rows."""
        shards, ids = {row.shard for row in rows}, [row.id for row in rows]
        self._record(Incident.Kind.UNKNOWN, shards, ids, drainer=drainer, detail=detail)

    def note_heartbeat(self) -> None:
        """Forget the rows sent so far: the shards had not been taken over when they were sent."""
        self._shards, self._span = set(), []

    def record_loss(self, *, drainer: str) -> None:
        """Record that the shards were lost: their next owner may have sent the same rows."""
        if not self._span:
            return
        detail = "Sent after its last heartbeat by a drainer that had lost its shards and lived."
        kind = Incident.Kind.TAKEOVER
        self._record(kind, self._shards, self._span, drainer=drainer, detail=detail)
        self.note_heartbeat()

    def _record(self, kind: str, shards: set[int], ids: list[int], **words: str) -> None:
        self._incidents.append({"kind": kind, "shards": shards, "ids": ids, **words})

    def flush(self) -> None:
        """Write the incidents, then settle rows. After a ``django.db.Error`` the rest is kept.

        Rows that another transaction has locked are kept, too: this drainer does not read them
        again, and an incident records that the next owner of their shards may do so.
        """
        if not (self._incidents or self._published or self._awaited):
            return
        while self._incidents:
            record_incident(**self._incidents[0], using=self.using)
            del self._incidents[0]
        there = StagedJob.objects.using(self.using)
        left: list[tuple[int, str, int]] = []
        if delete(self._published, using=self.using) < len(self._published):
            left = _among(self._published, there)
        self._published = [row[:2] for row in left]
        left += (locked := self._mark_sent(there))
        self._awaited = [row[:2] for row in locked]
        known, self.locked = self.locked, {id: shard for id, _, shard in left}
        if new := {id: shard for id, shard in self.locked.items() if id not in known}:
            detail = "Published while another transaction had locked them, to cancel them, say."
            self._record(Incident.Kind.UNKNOWN, {*new.values()}, [*new], detail=detail)
            self.flush()

    def _mark_sent(self, there: QuerySet[StagedJob]) -> list[tuple[int, str, int]]:
        """Mark rows with a receipt; return those that are locked.

        A row that is gone, or marked, is settled: its worker was quick, or another drainer was
        first. A worker that ends a job has its row locked for the moment of that commit.
        """
        is_due = Q(available_at=None) | Q(available_at__lte=DatabaseNow())
        waiting = there.filter(Q(sent_at=None) | is_due)
        pauses = list(PAUSES)
        left: list[tuple[int, str, int]] = []
        while self._awaited and mark_sent(self._awaited, using=self.using) < len(self._awaited):
            left = _among(self._awaited, waiting)
            self._awaited = [row[:2] for row in left]
            if not left or not pauses:
                return left
            time.sleep(pauses.pop(0))
        return []


def _among(rows: list[tuple[int, str]], there: QuerySet[StagedJob]) -> list[tuple[int, str, int]]:
    """Return those of these rows that are there, with their shards."""
    found = there.filter(pk__in=[id for id, _ in rows]).values_list("id", "task_id", "shard")
    wanted = set(rows)
    return [row for row in found if row[:2] in wanted]
