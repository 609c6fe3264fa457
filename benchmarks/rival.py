"""pyeventsourcing on PostgreSQL, as fast as it lets itself be used.

Its writers lock the whole table from the append to the commit, so that positions commit in order;
then ``id > cursor`` is exact for its readers. Here a reader selects as many rows at once as ours
does, decodes their JSON and stores its position once a page; its own runners do so once an event.
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
    """Holds its transaction open for other work after it has appended."""

    seconds = 0.0

    def _fetch_ids_after_insert_events(self, *args: Any, **kwargs: Any) -> Any:
        ids = super()._fetch_ids_after_insert_events(*args, **kwargs)
        time.sleep(self.seconds)
        return ids


def datastore() -> PostgresDatastore:
    """Return its connections to the database of the benchmark."""
    from django.db import connection

    given = connection.settings_dict
    return PostgresDatastore(
        given["NAME"], given["HOST"], given["PORT"], given["USER"], given["PASSWORD"]
    )


def recorder(store: PostgresDatastore, *, work: float = 0.0) -> Recorder:
    """Return its writer and reader."""
    made = Recorder(store, events_table_name=TABLE)
    made.seconds = work
    return made


def create_tables() -> None:
    """Make its tables."""
    store = datastore()
    Recorder(store, events_table_name=TABLE).create_table()
    PostgresTrackingRecorder(store, tracking_table_name=TRACKING).create_table()
    store.close()


def stored(id: UUID, versions: Iterable[int], state: bytes) -> list[StoredEvent]:
    """Return events of one aggregate."""
    return [StoredEvent(id, version, "order.placed", state) for version in versions]


def read(store: PostgresDatastore, *, page: int) -> int:
    """Read everything. Returns how many events that was."""
    reader, name = recorder(store), str(uuid4())
    tracking = PostgresTrackingRecorder(store, tracking_table_name=TRACKING)
    at, count = 0, 0
    while found := reader.select_notifications(at, page, inclusive_of_start=False):
        for each in found:
            json.loads(each.state)
        at, count = found[-1].id, count + len(found)
        tracking.insert_tracking(Tracking(name, at))
    return count
