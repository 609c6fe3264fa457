"""PostgreSQL reuses transaction ids after a crash; an offset must not contain such ids."""

from __future__ import annotations

import os
import signal

import pytest
from django.db import connections, transaction

from outbox_app.events import publish
from outbox_app.events.log.scans.postgres import PostgresScan
from outbox_app.events.models import Event
from outbox_app.pipeline.archive_reader import ReadPartition
from outbox_app.pipeline.database import connect
from outbox_app.pipeline.offset import Offsets
from outbox_app.pipeline.schema import SCHEMA, arrow_types
from outbox_app.pipeline.source import batches
from tests.faults.tools import outbox_on
from tests.servers import PostgreSQL

from .harness import source

pytestmark = pytest.mark.django_db(databases=[])

ARROW = arrow_types(SCHEMA)


@pytest.fixture(scope="module")
def server():
    with PostgreSQL() as server:
        yield server


@pytest.fixture
def alias(server, django_db_blocker, settings):
    if "postgres" not in connections:
        pytest.skip("no PostgreSQL")
    with outbox_on(server.url, django_db_blocker, settings) as alias:
        yield alias


def roll_back(alias: str) -> int:
    with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
        cursor.execute("SELECT pg_current_xact_id()::text::bigint")
        [xid] = cursor.fetchone()
        transaction.set_rollback(True, using=alias)
    return xid


def events(alias: str, start, limit=None):
    options = source(alias)
    database = connect(options)
    try:
        offsets = Offsets(database)
        start = start or offsets.beginning()
        end = offsets.end(start, limit)
        parts = [] if end == start else offsets.parts(start, end, 2)
    finally:
        database.close()
    rows = [
        r
        for part in parts
        for batch in batches(options, ReadPartition(conditions=part), ARROW)
        for r in batch.to_pylist()
    ]
    return end, sorted(row["id"] for row in rows)


@pytest.mark.parametrize("limit", [None, 1])
def test_ids_that_are_given_out_again(alias, server, limit):
    with transaction.atomic(using=alias):
        publish("order-1", "order.placed", {})
    stop_wal_writer(alias)
    forgotten = [roll_back(alias) for _ in range(5)]
    end, first = events(alias, None, limit)
    assert len(first) == 1
    server.kill()
    server.start()
    connections[alias].close()
    for _ in range(8):
        with transaction.atomic(using=alias):
            publish("order-1", "order.paid", {})
    used = set(Event.objects.using(alias).values_list("txid", flat=True))
    found = []
    while True:
        following, ids = events(alias, end, limit)
        if following == end:
            break
        end, found = following, found + ids
    written = list(Event.objects.using(alias).order_by("id").values_list("id", flat=True))
    assert first + found == written
    # What was kept was on disk, so nothing of it was given out again.
    assert not used & set(forgotten)


def commit_without_waiting(alias: str, *streams: str) -> None:
    with transaction.atomic(using=alias):
        for stream in streams:
            publish(stream, "order.paid", {})
        with connections[alias].cursor() as cursor:
            cursor.execute("SET LOCAL synchronous_commit = off")


def stop_wal_writer(alias: str) -> None:
    """Until the crash nothing comes to disk but what a commit waits for."""
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT pid FROM pg_stat_activity WHERE backend_type = 'walwriter'")
        [pid] = cursor.fetchone()
    os.kill(pid, signal.SIGSTOP)


def crash(alias: str, server: PostgreSQL) -> None:
    server.kill()
    server.start()
    connections[alias].close()


def assert_belongs(alias: str, *offsets) -> None:
    """An offset is taken after the crash, and when positions were given out again."""
    for _ in range(2):
        database = connect(source(alias))
        try:
            for offset in offsets:
                Offsets(database).verify(offset)
        finally:
            database.close()
        commit_without_waiting(alias, *"bcd")


def test_what_comes_while_an_offset_is_made_is_not_named_by_it(alias, server, monkeypatch):
    flush = PostgresScan._outlast_a_crash

    def flush_and_commit(self):
        flush(self)
        commit_without_waiting(alias, "late")

    stop_wal_writer(alias)
    commit_without_waiting(alias, "a")
    monkeypatch.setattr(PostgresScan, "_outlast_a_crash", flush_and_commit)
    end, ids = events(alias, None)
    monkeypatch.undo()
    crash(alias, server)
    assert list(Event.objects.using(alias).values_list("id", flat=True)) == ids
    assert_belongs(alias, end)


def test_nor_what_is_not_on_disk_by_the_next_offset_in_a_window(alias, server):
    stop_wal_writer(alias)
    commit_without_waiting(alias, "a", "b", "c")
    first, _ = events(alias, None, 1)
    commit_without_waiting(alias, "late")
    second, _ = events(alias, first, 1)
    crash(alias, server)
    assert_belongs(alias, first, second)


def test_nor_by_that_of_the_beginning(alias, server):
    database = connect(source(alias))
    commit_without_waiting(alias, "late")
    beginning = Offsets(database).beginning()
    database.close()
    crash(alias, server)
    assert_belongs(alias, beginning)
