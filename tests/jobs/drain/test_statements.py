"""The cost of a batch: few statements, each an index range, beside any other rows in the table."""

from __future__ import annotations

import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from outbox_app import stage_many
from outbox_app.jobs.drain import batch
from outbox_app.jobs.drain.drain import Drain
from outbox_app.models import StagedJob
from tests import tasks
from tests.mysql import explain, plan_of

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

    # A look for ids, a SELECT by ids for each 900 of the batch, one DELETE. What is not full of
    # rows costs the same.
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


def explained(alias, sql, params):
    """Return the database's plan of a statement, and what it touches in all."""
    connection = connections[alias]
    with connection.cursor() as cursor:
        if connection.vendor == "postgresql":
            cursor.execute(f"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) {sql}", params)
            [[found]] = cursor.fetchall()
            return found[0]["Plan"]
        cursor.execute(explain(sql), params)
        return plan_of(cursor)


def analyze(alias):
    of_table = "TABLE " if connections[alias].vendor == "mysql" else ""
    with connections[alias].cursor() as cursor:
        cursor.execute(f"ANALYZE {of_table}outbox_stagedjob")


def nodes(plan):
    yield plan
    for child in plan.get("Plans", ()):
        yield from nodes(child)


@pytest.mark.parametrize("shards", [range(128), range(3)], ids=["all", "few"])
@pytest.mark.parametrize("statistics", ["fresh", "stale"])
@pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)
def test_a_look_is_an_index_range_whatever_the_statistics_say(alias, shards, statistics):
    connection = connections[alias]
    rows_of("mine", alias, 10)
    if statistics == "stale":  # made for an almost empty table
        analyze(alias)
    for app in ("mine", "others"):
        rows_of(app, alias, 128, doubled=5)
    if statistics == "fresh":
        analyze(alias)

    found = explained(alias, *batch._ids(connection, "mine", list(shards), 8))

    if connection.vendor == "postgresql":
        scans = [n for n in nodes(found) if n.get("Relation Name") == "outbox_stagedjob"]
        assert {n["Index Name"] for n in scans} == {"outbox_staged_ready"}
        assert not [n for n in nodes(found) if n["Node Type"] == "Sort"]
        assert found["Shared Hit Blocks"] + found["Shared Read Blocks"] < 20 * len(shards)
    else:
        scans = [row for row in found if row["table"] == "outbox_stagedjob"]
        assert len(scans) == 2 * len(shards)  # those that are ready, and those that are due
        assert {(row["type"], row["key"]) for row in scans} <= {
            ("ref", "outbox_staged_ready"),
            ("range", "outbox_staged_ready"),
        }
        assert not [row for row in scans if "filesort" in (row["Extra"] or "")]


@pytest.mark.parametrize("statistics", ["fresh", "of no row", "of other apps"])
@pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)
def test_a_batch_is_read_by_its_ids_whatever_the_statistics_say(alias, statistics):
    connection = connections[alias]
    if statistics == "of other apps":
        rows_of("others", alias, 128, doubled=5)
    if statistics != "fresh":
        analyze(alias)
    rows_of("mine", alias, 128, doubled=8)  # many pages: of few, a scan is as good
    if statistics == "fresh":
        analyze(alias)
    ids = StagedJob.objects.using(alias).filter(app="mine").order_by("id").values_list("id")
    some = [id for (id,) in ids[1000:1050]]

    found = explained(alias, batch._rows(connection, some), [])

    if connection.vendor == "postgresql":
        scans = [n for n in nodes(found) if "Index Name" in n]
        assert {n["Index Name"] for n in scans} == {"outbox_stagedjob_pkey"}
    else:
        [scan] = found
        assert (scan["type"], scan["key"]) == ("range", "PRIMARY")
