"""pyeventsourcing on PostgreSQL, used in its fastest way.

Its writers lock the whole table from the append to the commit, so that positions commit in order
and ``id > cursor`` is exact for its readers. Here its reader selects pages of outbox_app's size,
decodes their JSON and stores its position once per page; its own runners store it once per event.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterable
from typing import Any
from uuid import UUID, uuid4

try:
    from eventsourcing.persistence import StoredEvent, Tracking
    from eventsourcing.postgres import (
        PostgresApplicationRecorder,
        PostgresDatastore,
        PostgresTrackingRecorder,
    )
except ImportError as error:
    raise SystemExit(
        "The benchmark `log` measures beside pyeventsourcing, which is not installed. "
        "Run: make bench."
    ) from error

TABLE, TRACKING = "rival_events", "rival_tracking"


class Recorder(PostgresApplicationRecorder):
    """A recorder that keeps its transaction open for other work after it has appended."""

    seconds = 0.0

    def _fetch_ids_after_insert_events(self, *args: Any, **kwargs: Any) -> Any:
        ids = super()._fetch_ids_after_insert_events(*args, **kwargs)
        time.sleep(self.seconds)
        return ids


def datastore() -> PostgresDatastore:
    """Return pyeventsourcing's connections to the database of the benchmark."""
    from django.db import connection

    given = connection.settings_dict
    return PostgresDatastore(
        given["NAME"], given["HOST"], given["PORT"], given["USER"], given["PASSWORD"]
    )


def recorder(store: PostgresDatastore, *, work: float = 0.0) -> Recorder:
    """Return the object that appends and reads events."""
    made = Recorder(store, events_table_name=TABLE)
    made.seconds = work
    return made


def create_tables() -> None:
    """Create pyeventsourcing's tables."""
    store = datastore()
    Recorder(store, events_table_name=TABLE).create_table()
    PostgresTrackingRecorder(store, tracking_table_name=TRACKING).create_table()
    store.close()


def stored(id: UUID, versions: Iterable[int], state: bytes) -> list[StoredEvent]:
    """Return events of one aggregate."""
    return [StoredEvent(id, version, "order.placed", state) for version in versions]


def read(store: PostgresDatastore, *, page: int) -> int:
    """Read all events. Returns how many there were."""
    reader, name = recorder(store), str(uuid4())
    tracking = PostgresTrackingRecorder(store, tracking_table_name=TRACKING)
    at, count = 0, 0
    while found := reader.select_notifications(at, page, inclusive_of_start=False):
        for each in found:
            json.loads(each.state)
        at, count = found[-1].id, count + len(found)
        tracking.insert_tracking(Tracking(name, at))
    return count
