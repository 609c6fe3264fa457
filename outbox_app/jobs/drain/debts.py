"""What the database is owed: rows to delete because the broker took them, incidents to write down.

A debt is kept until it is paid, whatever fails in between, and a drainer reads nothing, gives up no
shard and hands nothing back while it has any: a row that was published must not be read again, and
an extra publish must not happen before its incident is written. Debts of a drainer that is killed
are covered by the incident of whoever takes its shards over. That incident ends with the rows that
were there: a drainer that lives and learns that it has lost its shards adds what it has sent since.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ...models import Incident
from .batch import Row, delete
from .records import record_incident


class Debts:
    """Debts of one drainer.

    Args:
        using: Database alias.
    """

    def __init__(self, *, using: str) -> None:
        self.using = using
        self._published: list[tuple[int, str]] = []
        self._incidents: list[dict[str, Any]] = []
        #: What was sent since the last heartbeat: its shards, its first and its last id.
        self._shards: set[int] = set()
        self._span: list[int] = []

    def delete(self, rows: Iterable[Row]) -> None:
        """Owe the deletion of rows."""
        self._published += [(row.id, row.task_id) for row in rows]

    def record_unknown(self, rows: Sequence[Row], *, drainer: str, detail: str) -> None:
        """Owe an incident: nobody knows whether the broker took these rows."""
        ids = [row.id for row in rows]
        shards = {row.shard for row in rows}
        self._record(Incident.Kind.UNKNOWN, shards, ids, drainer=drainer, detail=detail)

    def note_sent(self, rows: Sequence[Row]) -> None:
        """Note rows that the broker may have: another drainer may own their shards by now."""
        if rows:
            self._shards.update(row.shard for row in rows)
            ids = [*self._span, *(row.id for row in rows)]
            self._span = [min(ids), max(ids)]

    def note_heartbeat(self) -> None:
        """Until now nobody had taken the shards: what was sent before was sent by their owner."""
        self._shards, self._span = set(), []

    def record_loss(self, *, drainer: str) -> None:
        """Owe an incident: the shards are lost, and their next owner may have sent the same."""
        if self._span:
            detail = (
                "Sent after its last heartbeat by a drainer that had lost its shards and lived."
            )
            kind = Incident.Kind.TAKEOVER
            self._record(kind, self._shards, self._span, drainer=drainer, detail=detail)
            self.note_heartbeat()

    def _record(self, kind: str, shards: set[int], ids: list[int], **words: str) -> None:
        span = {"first_id": min(ids), "last_id": max(ids)}
        self._incidents.append({"kind": kind, "shards": sorted(shards), **span, **words})

    def pay(self) -> None:
        """Write and delete what is owed.

        Raises:
            django.db.Error: What was not done is owed still.
        """
        while self._incidents:
            record_incident(**self._incidents[0], using=self.using)
            del self._incidents[0]
        delete(self._published, using=self.using)
        self._published = []
