"""The reader that loses rows: by time, up to a second ago, with a cursor for each of 32 parts.

The usual advice leads to it: sort by (recorded_at, id), and stay a second behind, so that open
transactions have committed by then. Rows of a transaction that takes longer are never read.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

from .books import note

NAME = "naive"
#: Seconds that the reader stays behind the clock.
BEHIND = 1
PAGE = 500
#: Seconds to the next query after a page that was not full.
INTERVAL = 0.25


def run(stop: threading.Event, partitions: int = 32) -> None:
    """Read with one thread for each partition, until ``stop`` is set."""
    with ThreadPoolExecutor(partitions) as pool:
        for each in [pool.submit(_read, stop, partitions, n) for n in range(partitions)]:
            each.result()


def _read(stop: threading.Event, partitions: int, part: int) -> None:
    from django.db import connection

    reader = NaiveReader(partitions, part)
    while not stop.is_set():
        if not reader.run_once():
            stop.wait(INTERVAL)
    connection.close()


class NaiveReader:
    """The reader of one part of the log.

    Args:
        partitions: The number of parts.
        part: The number of this part.
    """

    def __init__(self, partitions: int, part: int) -> None:
        from django.db import connection

        from outbox_app.events.log.filter import EventFilter

        from .models import Place, TimedEvent

        self.place = Place.objects.create(reader=NAME)
        self.position, self.at = 0, datetime(2000, 1, 1)
        condition, _ = EventFilter(parts=partitions, part=part).sql()
        past = f"STATEMENT_TIMESTAMP() - INTERVAL '{BEHIND} second'"
        if connection.vendor == "mysql":
            past = f"UTC_TIMESTAMP(6) - INTERVAL {BEHIND} SECOND"
        self.sql = (
            f"SELECT id, recorded_at FROM {TimedEvent._meta.db_table} "
            f"WHERE recorded_at >= %s AND (recorded_at > %s OR id > %s) AND recorded_at < {past} "
            f"AND {condition or '1 = 1'} ORDER BY recorded_at, id LIMIT {PAGE}"
        )

    def run_once(self) -> bool:
        """Read a page, and store the position after it. Returns whether the page was full."""
        from django.db import connection, transaction

        from .models import Place

        with connection.cursor() as cursor:
            cursor.execute(self.sql, [self.at, self.at, self.position])
            rows = cursor.fetchall()
        if not rows:
            return False
        self.position, self.at = rows[-1]
        with transaction.atomic():
            note(NAME, [id for id, _ in rows])
            place = Place.objects.filter(pk=self.place.pk)
            place.update(position=self.position, at=str(self.at))
        return len(rows) == PAGE
