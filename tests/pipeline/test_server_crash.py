"""PostgreSQL gives ids of transactions out again after a crash; an offset must not know of them."""

from __future__ import annotations

import pytest
from django.core.management import call_command
from django.db import connections, transaction

from outbox_app import publish
from outbox_app.models import Event
from outbox_app.pipeline.database import connect
from outbox_app.pipeline.offset import Offsets
from outbox_app.pipeline.schema import SCHEMA, arrow_types
from outbox_app.pipeline.source import batches
from tests.faults.tools import alias_for
from tests.servers import PostgreSQL

from .harness import source

pytestmark = pytest.mark.django_db(databases=[])

ARROW = arrow_types(SCHEMA)


@pytest.fixture
def server():
    """One that is in no hurry to have on disk what nobody waits for."""
    with PostgreSQL(extra_arguments=["-c", "wal_writer_delay=10s"]) as server:
        yield server


@pytest.fixture
def alias(server, django_db_blocker, settings):
    if "postgres" not in connections:
        pytest.skip("no PostgreSQL")
    with django_db_blocker.unblock(), alias_for(server.url) as alias:
        call_command("migrate", database=alias, verbosity=0)
        settings.OUTBOX = {**settings.OUTBOX, "DATABASE": alias}
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
        r for part in parts for batch in batches(options, part, ARROW) for r in batch.to_pylist()
    ]
    return end, sorted(row["id"] for row in rows)


@pytest.mark.parametrize("limit", [None, 1])
def test_ids_that_are_given_out_again(alias, server, limit):
    with transaction.atomic(using=alias):
        publish("order-1", "order.placed", {})
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
