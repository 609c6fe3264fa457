"""Deletions and incidents that a drainer has still to write, kept through any failure.

Until they are written the drainer reads nothing, gives up no shard and hands nothing back: a row
that was published must not be read again, and an extra publish must not happen before its incident
is written. If a drainer is killed, the incident of its shards' takeover covers what it had kept.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...models import Incident, StagedJob
from .batch import Row, delete
from .incidents import record_incident


class Unsettled:
    """Deletions and incidents that one drainer has still to write."""

    def __init__(self, *, using: str) -> None:
        self.using = using
        self._published: list[tuple[int, str]] = []
        self._incidents: list[dict[str, Any]] = []
        #: Published rows that cannot be deleted, as another transaction has locked them: their ids,
        #: with their shards.
        self.locked: dict[int, int] = {}
        #: Rows sent since the last heartbeat: their shards, the first and the last id.
        self._shards: set[int] = set()
        self._span: list[int] = []

    def sent(self, rows: Sequence[Row]) -> None:
        """Delete, with the next flush, rows that the broker has taken.

        Note them until the next heartbeat: another drainer may own their shards by now.
        """
        self._published += [(row.id, row.task_id) for row in rows]
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
        """Write the incidents, then delete. After a ``django.db.Error`` the rest is kept.

        Rows that another transaction has locked are kept, too: this drainer does not read them
        again, and an incident records that the next owner of their shards may do so.
        """
        if not (self._incidents or self._published):
            return
        while self._incidents:
            record_incident(**self._incidents[0], using=self.using)
            del self._incidents[0]
        left: list[tuple[int, str, int]] = []
        if delete(self._published, using=self.using) < len(self._published):
            published = dict(self._published)
            rows = StagedJob.objects.using(self.using).filter(pk__in=published)
            there = rows.values_list("id", "task_id", "shard")
            left = [row for row in there if row[:2] in published.items()]
        known, self.locked = self.locked, {id: shard for id, _, shard in left}
        self._published = [row[:2] for row in left]
        if new := {id: shard for id, shard in self.locked.items() if id not in known}:
            detail = "Published while another transaction had locked them, to cancel them, say."
            self._record(Incident.Kind.UNKNOWN, {*new.values()}, [*new], detail=detail)
            self.flush()
