"""What a batch costs the database: few statements, each an index range, whatever lies beside it."""

from __future__ import annotations

import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from outbox_app import stage_many
from outbox_app.jobs.drain import batch
from outbox_app.jobs.drain.drain import Drain
from outbox_app.models import StagedJob
from tests import tasks

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("jobs", [10, 900])
def test_a_batch_is_a_constant_number_of_statements(alias, make_app, monkeypatch, jobs):
    app = make_app()
    note = app.task(name="note")(tasks.note)
    drain = Drain(using=alias, lease_seconds=600)
    drain.run_once()
    with transaction.atomic(using=alias):
        stage_many((note.s("", i) for i in range(jobs)), using=alias)
    drain.run_once()  # finds the app
    drained = drain.tally.published
    # What a minute costs, whether there are jobs or not: tests/process/counters.
    monkeypatch.setattr(drain._counters, "keep", lambda: None)

    with CaptureQueriesContext(connections[alias]) as statements:
        while drain.tally.published < jobs:
            drain.run_once()

    # A sweep asks for ready rows and for due ones, a batch of deep shards for ready ones; then one
    # DELETE. What is not full of rows costs the same.
    batches = -(-(jobs - drained) // 900) + 1
    assert len(statements) <= 4 * batches
    drain.holder.leave()


def rows_of(app, alias, count, doubled=0):
    blank = {"app": app, "task": "note", "queue": "q", "body": b"[]", "envelope": "{}"}
    rows = (StagedJob(task_id=str(i), shard=i % 128, **blank) for i in range(count))
    StagedJob.objects.using(alias).bulk_create(rows)
    names = ", ".join(field.column for field in StagedJob._meta.fields if not field.primary_key)
    again = f"INSERT INTO outbox_stagedjob ({names}) SELECT {names} FROM outbox_stagedjob"
    with connections[alias].cursor() as cursor:
        for _ in range(doubled):
            cursor.execute(f"{again} WHERE app = %s ORDER BY id", [app])


def plan(alias, shards, condition):
    """Return the database's plan of a batch, and what it touches in all."""
    connection = connections[alias]
    sql, params = batch._sql(connection, "mine", shards, condition, 8)
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}", params)
            [[found]] = cursor.fetchall()
            return found[0]["Plan"]
        cursor.execute(f"EXPLAIN {sql}", params)
        return cursor.fetchall()


def nodes(plan):
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


@pytest.mark.parametrize("shards", [range(128), range(3)], ids=["all", "few"])
@pytest.mark.parametrize("condition", ["available_at IS NULL", "available_at <= now()"])
@pytest.mark.parametrize("statistics", ["fresh", "stale"])
@pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)
def test_a_batch_is_an_index_range_whatever_the_statistics_say(
    alias, shards, condition, statistics
):
    connection = connections[alias]
    table = "ANALYZE outbox_stagedjob"
    if connection.vendor == "mysql":
        table = "ANALYZE TABLE outbox_stagedjob"
    rows_of("mine", alias, 10)
    if statistics == "stale":  # made for an almost empty table
        with connection.cursor() as cursor:
            cursor.execute(table)
    for app in ("mine", "others"):
        rows_of(app, alias, 128, doubled=5)
    if statistics == "fresh":
        with connection.cursor() as cursor:
            cursor.execute(table)

    found = plan(alias, list(shards), condition)

    if connection.vendor == "postgresql":
        scans = [n for n in nodes(found) if n.get("Relation Name") == "outbox_stagedjob"]
        assert {n["Index Name"] for n in scans} == {"outbox_staged_ready"}
        assert not [n for n in nodes(found) if n["Node Type"] == "Sort"]
        assert found["Shared Hit Blocks"] + found["Shared Read Blocks"] < 20 * len(shards)
    else:
        scans = [row for row in found if row[2] == "outbox_stagedjob"]
        assert len(scans) == len(shards)
        assert {(row[3], row[5]) for row in scans} <= {
            ("ref", "outbox_staged_ready"),
            ("range", "outbox_staged_ready"),
        }
        assert not [row for row in scans if "filesort" in (row[9] or "")]
