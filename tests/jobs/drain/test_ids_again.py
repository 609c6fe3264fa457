"""Ids are reused (after a fail-over, a restore, TRUNCATE): this affects no other job."""

from __future__ import annotations

import pytest
from django.db import connections, transaction

from outbox_app.failpoints import set_failpoint
from outbox_app.jobs import bulk, dead, staged
from outbox_app.jobs.drain import batch, dead_rows
from outbox_app.jobs.drain.dead_rows import move_to_dead
from outbox_app.jobs.drain.drain import Drain
from outbox_app.models import DeadJob, StagedJob
from outbox_app.monitoring.series import _now
from tests import tasks
from tests.mysql import explain as explained
from tests.servers.mysql import MARIADB

from .test_main_path import received

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def note(make_app):
    return make_app().task(name="note")(tasks.note)


def stage(note, alias, words, **options):
    with transaction.atomic(using=alias):
        for word in words:
            note.apply_async((word, 0), **options)


def truncate(alias, table="outbox_stagedjob"):
    """Empty the table, and let its ids begin at 1 again."""
    with connections[alias].cursor() as cursor:
        if alias == "default":
            cursor.execute(f"DELETE FROM {table}")
            cursor.execute("DELETE FROM sqlite_sequence WHERE name = %s", [table])
        else:
            restart = "RESTART IDENTITY" if alias == "postgres" else ""
            cursor.execute(f"TRUNCATE TABLE {table} {restart}")


@pytest.fixture(params=[1, 300])
def many(request):
    return request.param


def test_what_is_owed_deletes_no_other_job(alias, note, many):
    truncate(alias)
    stage(note, alias, ["first"] * many)
    first = set(StagedJob.objects.using(alias).values_list("id", flat=True))
    again = []

    def lose_the_table():
        set_failpoint("published_not_deleted", None)
        truncate(alias)
        stage(note, alias, ["second"] * many)
        again.extend(StagedJob.objects.using(alias).values_list("id", flat=True))

    set_failpoint("published_not_deleted", lose_the_table)
    try:
        Drain(using=alias, batch_size=many).run(once=True)
    finally:
        set_failpoint("published_not_deleted", None)

    assert set(again) & first
    words = [message.payload[0][0] for message in received(note.app)]
    assert words.count("second") == many
    assert not StagedJob.objects.using(alias).exists()


def test_a_job_that_another_one_s_row_has_become_is_not_dead(alias, note):
    truncate(alias)
    stage(note, alias, ["first"])
    [row] = batch.BatchReader(using=alias, app=note.app.main, batch_size=9).read(range(128))
    truncate(alias)
    stage(note, alias, ["second"])
    assert StagedJob.objects.using(alias).get().pk == row.id

    assert move_to_dead(row, ValueError("of the first one"), using=alias) is None

    assert StagedJob.objects.using(alias).count() == 1
    assert not DeadJob.objects.using(alias).exists()


def test_a_job_that_another_drainer_has_published_meanwhile_is_not_dead_as_well(
    alias, note, monkeypatch
):
    stage(note, alias, ["first"])
    [row] = batch.BatchReader(using=alias, app=note.app.main, batch_size=9).read(range(128))
    begin = dead_rows.atomic_with_lock_wait

    def publish_and_begin(*args, **options):  # after the row was read, before it is locked
        assert batch.delete([(row.id, row.task_id)], using=alias) == 1
        return begin(*args, **options)

    monkeypatch.setattr(dead_rows, "atomic_with_lock_wait", publish_and_begin)
    assert move_to_dead(row, ValueError("no"), using=alias) is None
    assert not DeadJob.objects.using(alias).exists()


def test_a_job_that_cannot_be_written_as_dead_stays(alias, note, monkeypatch):
    stage(note, alias, ["first"])
    [row] = batch.BatchReader(using=alias, app=note.app.main, batch_size=9).read(range(128))
    monkeypatch.setattr(StagedJob, "as_dead", lambda job, **_: DeadJob(nonsense=1))
    with pytest.raises(TypeError):
        move_to_dead(row, ValueError("no"), using=alias)
    assert StagedJob.objects.using(alias).get().pk == row.id


TASK_IDS = ["a:1", "'\"\\%s%%", "Ünïcode 🚚", "case", "Case", "space ", "a,b}{", "x" * 255]


def test_any_task_id(alias, note):
    """They come from callers."""
    for task_id in TASK_IDS:
        stage(note, alias, ["word"], task_id=task_id)
    rows = list(StagedJob.objects.using(alias).order_by("id").values_list("id", "task_id"))

    batch.delete([(id, f"{task_id}?") for id, task_id in rows], using=alias)
    batch.delete([(id, task_id.swapcase()) for id, task_id in rows[3:5]], using=alias)
    batch.delete([(rows[5][0], "space")], using=alias)
    assert StagedJob.objects.using(alias).count() == len(TASK_IDS)

    batch.delete(rows, using=alias)
    assert not StagedJob.objects.using(alias).exists()


def test_more_rows_than_an_engine_takes_parameters(alias, note, monkeypatch):
    monkeypatch.setattr(batch, "DELETED_AT_ONCE", 70_000)
    stage(note, alias, ["word"])
    rows = list(StagedJob.objects.using(alias).values_list("id", "task_id"))
    beyond = rows[0][0] + 1
    batch.delete([*((beyond + i, "none") for i in range(69_000)), *rows], using=alias)
    assert not StagedJob.objects.using(alias).exists()


@pytest.mark.parametrize(("there", "count"), [(0, 3), (2, 2), (1000, 3), (1000, 300)])
def test_each_row_is_looked_up_by_its_id(alias, note, there, count):
    """Also where a scan is cheaper: on MySQL it waits for the rows of every open transaction."""
    stage(note, alias, ["word"] * there)
    rows = list(StagedJob.objects.using(alias).order_by("id").values_list("id", "task_id"))
    rows += [(10**9 + i, "gone") for i in range(count - there)]
    plans = []

    def explain(execute, sql, params, many, context):
        prefix = "EXPLAIN QUERY PLAN" if alias == "default" else "EXPLAIN"
        asked = explained(sql) if alias == MARIADB else f"{prefix} {sql}"
        result = execute(asked, params, many, context)
        plans.extend(str(line) for line in context["cursor"].fetchall())
        return result

    if alias != "default":
        table = "ANALYZE TABLE" if alias == MARIADB else "ANALYZE"
        with connections[alias].cursor() as cursor:
            cursor.execute(f"{table} outbox_stagedjob")
    with connections[alias].execute_wrapper(explain):
        batch.delete(rows[:count], using=alias)

    looked_up = {"postgres": "_pkey", "default": "INTEGER PRIMARY KEY", MARIADB: "'eq_ref'"}
    if alias != "postgres" or there > count:  # where it scans it waits for nobody
        assert any(looked_up[alias] in line for line in plans), plans


@pytest.mark.parametrize("decide", ["requeue_dead", "discard_dead"])
def test_a_decision_on_dead_jobs_is_about_those_that_were_there(alias, note, decide):
    asked = _now(alias)
    make_dead(note, alias)  # what it was about is gone; this one has its id
    jobs = DeadJob.objects.using(alias).all()
    act = getattr(dead, decide)
    assert act(jobs, until=10**9, asked=asked).done == 0
    assert jobs.count() == 1
    assert act(jobs, until=10**9, asked=_now(alias)).done == 1


def test_a_decision_on_staged_jobs_is_about_those_that_were_there(alias, note):
    asked = _now(alias)
    stage(note, alias, ["word"], countdown=86400)
    jobs = StagedJob.objects.using(alias).all()
    assert staged.cancel_for(jobs, until=10**9, asked=asked).done == 0
    assert jobs.held().count() == 1
    assert staged.cancel_for(jobs, until=10**9, asked=_now(alias)).done == 1


@pytest.mark.parametrize("decide", ["requeue", "discard"])
def test_a_call_that_loses_the_table_half_way(alias, note, decide, monkeypatch):
    act = getattr(dead, f"_{decide}_batch")
    batches = []

    def lose_the_table(locked, ids, **options):
        batches.append(ids)
        if len(batches) == 2:
            truncate(alias, "outbox_deadjob")
            for _ in range(3):
                make_dead(note, alias)
        return act(locked, ids, **options)

    truncate(alias, "outbox_deadjob")
    for _ in range(2):
        make_dead(note, alias)
    monkeypatch.setattr(dead, f"_{decide}_batch", lose_the_table)
    monkeypatch.setattr(bulk, "BATCH_SIZE", 1)
    jobs = DeadJob.objects.using(alias).all()
    assert getattr(dead, f"{decide}_dead")(jobs).done == 1
    assert batches == [[1], [2]]
    assert set(jobs.values_list("id", flat=True)) >= {1, 2, 3}


def make_dead(note, alias):
    stage(note, alias, ["word"])
    reader = batch.BatchReader(using=alias, app=note.app.main, batch_size=9)
    for row in reader.read(range(128)):
        assert move_to_dead(row, ValueError("no"), using=alias)
