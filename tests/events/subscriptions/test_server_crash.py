"""PostgreSQL reuses transaction ids after a crash; no partition skips the events of such ids."""

from __future__ import annotations

from contextlib import ExitStack

import pytest
from django.db import connections, transaction

from outbox_app.events import publish, subscriber
from outbox_app.events.log.newevent import slice_of
from outbox_app.events.models import Cursor
from outbox_app.events.subscriptions.runner import Runner
from outbox_app.events.subscriptions.subscriber import subscriber_named
from tests.faults.test_pgbouncer import pooling
from tests.faults.tools import outbox_on
from tests.servers import PostgreSQL

pytestmark = pytest.mark.django_db(databases=[])


@pytest.fixture
def server():
    """A PostgreSQL server that writes commits to disk late."""
    slow = ["-c", "wal_writer_delay=10s", "-c", "synchronous_commit=off"]
    with PostgreSQL(extra_arguments=slow) as server:
        yield server


@pytest.fixture(params=[False, True], ids=["direct", "pooled"])
def pooled(request):
    """Whether a connection outlives the server."""
    return request.param


@pytest.fixture
def alias(pooled, server, django_db_blocker, settings):
    if "postgres" not in connections:
        pytest.skip("no PostgreSQL")
    with ExitStack() as stack:
        url = server.url
        if pooled:
            port = stack.enter_context(pooling(url))
            url = url.replace(f":{server.port}/", f":{port}/")
        alias = stack.enter_context(outbox_on(url, django_db_blocker, settings))
        yield alias


def commit(alias: str, stream: str, count: int = 1, *, synchronous: str = "off") -> None:
    for _ in range(count):
        with transaction.atomic(using=alias):
            with connections[alias].cursor() as cursor:
                cursor.execute(f"SET LOCAL synchronous_commit = {synchronous}")
            publish(stream, "made")


def test_a_partition_that_followed_another_one_in_memory(alias, server, pooled):
    seen: list[tuple[str, int]] = []
    subscriber("two", partitions=2)(
        lambda events: seen.extend((e.stream, e.version) for e in events)
    )
    busy, idle = (next(s for s in "abcdefgh" if slice_of(s) % 2 == part) for part in (0, 1))
    runner = Runner([subscriber_named("two")], lease_seconds=600)
    commit(alias, busy)
    commit(alias, idle)
    while runner.run_once():
        pass
    commit(alias, busy, synchronous="on")  # all before it is on disk
    commit(alias, busy, 3)
    for _ in range(3):
        runner.run_once()
    stored = Cursor.objects.using(alias).get(partition=1).state
    [idle_state] = [each.state for each in runner.workers[0].partitions[1].cursors]
    assert idle_state.dump() != stored  # it has followed the other partition
    seen.clear()
    before = connections[alias].connection
    server.kill()
    server.start()
    if not pooled:
        connections[alias].close()
    commit(alias, idle, 30)
    kept = connections[alias].connection is before
    for _ in range(50):
        for partition in runner.workers[0].partitions.values():
            partition._rest_until = float("-inf")
        runner.workers[0].backoff.succeeded()
        runner.run_once()
    runner._leave()
    assert kept == pooled
    assert [event for event in seen if event[0] == idle] == [(idle, v) for v in range(2, 32)]
