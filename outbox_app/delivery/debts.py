"""What the database is owed: rows to delete because the broker took them, incidents to write down.

A debt is kept until it is paid, whatever fails in between, and a drainer reads nothing, gives up no
shard and hands nothing back while it has any: a row that was published must not be read again, and
an extra publish must not happen before its incident is written. Debts of a drainer that is killed
are covered by the incident of whoever takes its shards over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from ..models import Incident
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

    def delete(self, rows: Iterable[Row]) -> None:
        """Owe the deletion of rows."""
        self._published += [(row.id, row.task_id) for row in rows]

    def record_unknown(self, rows: Sequence[Row], *, drainer: str, detail: str) -> None:
        """Owe an incident: nobody knows whether the broker took these rows."""
        ids = [row.id for row in rows]
        incident = {
            "kind": Incident.Kind.UNKNOWN,
            "shards": sorted({row.shard for row in rows}),
            "first_id": min(ids),
            "last_id": max(ids),
            "drainer": drainer,
            "detail": detail,
        }
        self._incidents.append(incident)

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
