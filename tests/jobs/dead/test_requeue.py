"""Dead jobs are requeued once, in order, with the same message, and with an incident."""

from __future__ import annotations

import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from outbox_app.database.clock import DatabaseNow
from outbox_app.exceptions import InvalidJob
from outbox_app.jobs import bulk, dead
from outbox_app.jobs.dead import discard_dead, requeue_dead
from outbox_app.models import DeadJob, Incident, StagedJob
from outbox_app.process.wakeup import JOBS, _waker
from outbox_app.signals import jobs_staged

from .rows import columns, dead_jobs, dead_row, staged_jobs


def staged(alias):
    return list(StagedJob.objects.using(alias).order_by("id"))


def is_dead(alias):
    return list(
        DeadJob.objects.using(alias).order_by("staged_id").values_list("task_id", flat=True)
    )


def everything(alias):
    return DeadJob.objects.using(alias).all()


@pytest.mark.django_db
def test_a_requeued_job_is_the_same_message_in_a_new_row(alias):
    [earlier] = staged_jobs(using=alias)
    [job] = dead_jobs(using=alias, ordering_key="ключ", body=b"\x00\xff\x80pickle", queue="q")

    assert requeue_dead(everything(alias), by="ann").done == 1

    assert not DeadJob.objects.using(alias).exists()
    [_, row] = staged(alias)
    same = ("shard", "ordering_key", "app", "task", "task_id", "queue", "body", "envelope")
    assert [getattr(row, name) for name in same] == [getattr(job, name) for name in same]
    assert row.pk > earlier.pk
    assert row.available_at is None


@pytest.mark.django_db
@pytest.mark.parametrize("decide", [requeue_dead, discard_dead])
def test_a_queryset_without_using_is_on_the_outboxs_alias(alias, decide):
    dead_jobs(using=alias)
    assert decide(DeadJob.objects.all()).done == 1
    assert not DeadJob.objects.using(alias).exists()


@pytest.fixture
def in_twos(monkeypatch):
    """A batch has two jobs."""
    monkeypatch.setattr(bulk, "BATCH_SIZE", 2)


@pytest.fixture
def one_each(monkeypatch):
    """Record an incident for each batch."""
    record = dead.record_requeue
    monkeypatch.setattr(dead, "record_requeue", lambda *, same_as, **values: record(**values))


@pytest.mark.django_db
def test_the_batches_of_a_call_are_one_incident(alias, in_twos):
    dead_jobs(5, using=alias)
    requeue_dead(everything(alias), by="ann")
    rows = staged(alias)
    incident = Incident.objects.using(alias).get()
    assert (incident.first_id, incident.last_id) == (rows[0].pk, rows[-1].pk)
    assert incident.shards == sorted({row.shard for row in rows})

    assert incident.detail == "Dead jobs requeued by ann."

    dead_jobs(1, using=alias)
    requeue_dead(everything(alias), by="ann", reason="the queue is back")
    newest = Incident.objects.using(alias).latest("id")
    assert newest.detail == "Dead jobs requeued by ann (reason: the queue is back)."
    assert Incident.objects.using(alias).count() == 2

    dead_jobs(3, using=alias)
    requeue_dead(everything(alias), by="ann")
    newest = Incident.objects.using(alias).latest("id")
    rows = staged(alias)
    assert (newest.first_id, newest.last_id) == (rows[6].pk, rows[-1].pk)


@pytest.mark.django_db
def test_an_incident_that_was_pruned_meanwhile_is_recorded_anew(alias):
    dead_jobs(3, using=alias)

    incidents = [12345]
    ids = list(everything(alias).values_list("pk", flat=True))
    dead._requeue_batch(everything(alias), ids, by="", incidents=incidents)
    incident = Incident.objects.using(alias).get()
    assert incidents == [12345, incident.pk]
    assert (incident.first_id, incident.last_id) == (staged(alias)[0].pk, staged(alias)[2].pk)


@pytest.mark.django_db
def test_each_batch_is_recorded_as_an_incident_with_its_ids_and_shards(alias, in_twos, one_each):
    dead_jobs(5, using=alias)

    assert requeue_dead(everything(alias), by="ann").done == 5

    rows = staged(alias)
    incidents = list(Incident.objects.using(alias).order_by("id"))
    assert [(i.kind, i.first_id, i.last_id) for i in incidents] == [
        ("requeue", rows[0].pk, rows[1].pk),
        ("requeue", rows[2].pk, rows[3].pk),
        ("requeue", rows[4].pk, rows[4].pk),
    ]
    assert incidents[0].shards == sorted({rows[0].shard, rows[1].shard})
    assert incidents[0].detail == "Dead jobs requeued by ann."


@pytest.mark.django_db
def test_jobs_come_back_in_the_order_in_which_they_were_staged(alias, in_twos):
    for staged_id in (30, 10, 40, 20, 50):
        dead_jobs(using=alias, staged_id=staged_id, task_id=f"id-{staged_id}", ordering_key="k")

    requeue_dead(everything(alias))

    assert [row.task_id for row in staged(alias)] == ["id-10", "id-20", "id-30", "id-40", "id-50"]


@pytest.mark.django_db
def test_windows_of_ids_follow_one_another(alias, in_twos, monkeypatch):
    monkeypatch.setattr(bulk, "STEP", 3)
    for number in range(10):
        dead_jobs(using=alias, staged_id=number // 4, task_id=f"id-{number}")

    assert requeue_dead(everything(alias)).done == 10

    assert [row.task_id for row in staged(alias)] == [f"id-{number}" for number in range(10)]


@pytest.mark.django_db
def test_a_run_whose_time_is_over_reads_one_step(alias, monkeypatch):
    """However many rows match: the first query of a request must not be a long one."""
    monkeypatch.setattr(bulk, "STEP", 3)
    jobs = dead_jobs(10, using=alias)
    run = dead.requeue_dead(everything(alias), until=jobs[-1].pk, asked=DatabaseNow(), seconds=0)
    assert (run.done, run.after) == (3, jobs[2].staged_id)


@pytest.mark.django_db
def test_a_batch_with_large_messages_ends_earlier(alias, monkeypatch, one_each):
    monkeypatch.setattr(bulk, "BUDGET_BYTES", 2500)
    dead_jobs(5, using=alias, body=b"x" * 1000, envelope="{}")

    assert requeue_dead(everything(alias)).done == 5

    assert Incident.objects.using(alias).count() == 3


@pytest.mark.django_db
def test_a_message_above_the_budget_goes_alone(alias, monkeypatch):
    monkeypatch.setattr(bulk, "BUDGET_BYTES", 10)
    dead_jobs(2, using=alias)
    assert requeue_dead(everything(alias)).done == 2


@pytest.mark.django_db
def test_a_job_that_dies_again_meanwhile_is_not_requeued_for_ever(
    alias, in_twos, monkeypatch, one_each
):
    monkeypatch.setattr(bulk, "STEP", 2)
    for staged_id in range(-4, 0):  # lower than those that the requeued rows get
        dead_jobs(using=alias, staged_id=staged_id)

    def die_again(**kwargs):
        for row in staged(alias):
            DeadJob.objects.using(alias).create(
                **row.copied(), staged_id=row.pk, error="E", reason="again"
            )
            row.delete()

    jobs_staged.connect(die_again, weak=False, dispatch_uid="die_again")
    try:
        assert requeue_dead(everything(alias)).done == 4
    finally:
        jobs_staged.disconnect(dispatch_uid="die_again")
    assert len(is_dead(alias)) == 4


@pytest.mark.django_db
def test_a_batch_makes_the_same_number_of_statements_whatever_its_size(alias):
    def statements(count):
        dead_jobs(count, using=alias)
        with CaptureQueriesContext(
            connections[alias],
        ) as queries:
            assert requeue_dead(everything(alias)).done == count
        return len(queries)

    assert statements(40) == statements(3)
    assert statements(3) <= 12


@pytest.mark.django_db
def test_a_batch_does_not_look_through_the_jobs_that_wait(alias):
    """There may be a million of them, and no index has their task ids."""
    dead_jobs(3, using=alias)
    with CaptureQueriesContext(connections[alias]) as queries:
        requeue_dead(everything(alias))
    read = [q["sql"] for q in queries if q["sql"].startswith("SELECT")]
    read = [sql for sql in read if "outbox_stagedjob" in sql]
    assert not [sql for sql in read if "LAST_INSERT_ID" not in sql]  # MySQL: a range of ids


@pytest.mark.django_db(transaction=True)
def test_a_batch_that_fails_leaves_its_jobs_dead_and_the_others_requeued(
    alias, in_twos, monkeypatch
):
    dead_jobs(2, using=alias)
    [last] = dead_jobs(using=alias)

    def refuse(*, ids, **kwargs):
        if min(ids) == max(ids):
            raise InvalidJob("too large for the packet")
        return record(ids=ids, **kwargs)

    record = dead.record_requeue
    monkeypatch.setattr(dead, "record_requeue", refuse)
    with pytest.raises(InvalidJob):
        requeue_dead(everything(alias))

    assert is_dead(alias) == [last.task_id]
    assert len(staged(alias)) == 2

    monkeypatch.undo()
    assert requeue_dead(everything(alias)).done == 1  # what was left can be asked for again


@pytest.mark.django_db
def test_only_what_was_asked_for_is_requeued(alias):
    dead_jobs(2, using=alias, task="a")
    dead_jobs(3, using=alias, task="b")
    assert requeue_dead(everything(alias).filter(task="a")).done == 2
    assert len(is_dead(alias)) == 3
    assert requeue_dead(everything(alias).filter(task="a")).done == 0
    assert Incident.objects.using(alias).count() == 1


@pytest.mark.django_db(transaction=True)
def test_the_drainers_are_woken_after_the_commit(alias):
    dead_jobs(3, using=alias)
    with transaction.atomic(using=alias):
        requeue_dead(everything(alias))
        callbacks = [each for _, each, _ in connections[alias].run_on_commit]
        wakers = [each for each in callbacks if each is _waker(alias, JOBS)]
        assert len(wakers) == (1 if connections[alias].vendor == "postgresql" else 0)


@pytest.mark.django_db
@pytest.mark.parametrize(("asked", "batch_size"), [(["asked"], 1), (["asked", "later"], 2)])
def test_the_later_jobs_of_a_blocked_key_come_back_with_the_first(
    alias, settings, monkeypatch, asked, batch_size
):
    monkeypatch.setattr(bulk, "BATCH_SIZE", batch_size)
    settings.OUTBOX = {**settings.OUTBOX, "DEAD_KEY": "block"}
    names = ("before", "asked", "after", "later")
    for number, name in enumerate(names):
        dead_jobs(using=alias, staged_id=number, task_id=name, ordering_key="k")
    dead_jobs(using=alias, staged_id=9, task_id="other", ordering_key="other")

    chosen = everything(alias).filter(task_id__in=asked)
    assert requeue_dead(chosen).done == 3

    assert [row.task_id for row in staged(alias)] == ["asked", "after", "later"]
    assert is_dead(alias) == ["before", "other"]
    assert Incident.objects.using(alias).count() == 1


@pytest.mark.django_db
def test_a_later_job_that_died_after_the_question_stays(alias, settings):
    """By its id too: the database's clock may have been set back since."""
    settings.OUTBOX = {**settings.OUTBOX, "DEAD_KEY": "block"}
    first, later = dead_jobs(2, using=alias, ordering_key="k")
    chosen = everything(alias).filter(pk=first.pk)
    assert dead.requeue_dead(chosen, until=first.pk, asked=DatabaseNow()).done == 1
    assert is_dead(alias) == [later.task_id]


@pytest.mark.django_db
def test_a_blocked_key_comes_back_in_one_transaction(alias, in_twos, settings):
    settings.OUTBOX = {**settings.OUTBOX, "DEAD_KEY": "block"}
    dead_jobs(7, using=alias, ordering_key="k")
    assert requeue_dead(everything(alias)).done == 7
    assert Incident.objects.using(alias).count() == 1


@pytest.mark.django_db
def test_later_jobs_of_a_key_stay_where_keys_are_not_blocked(alias):
    first, _ = dead_jobs(2, using=alias, ordering_key="k")
    assert requeue_dead(everything(alias).filter(pk=first.pk)).done == 1


@pytest.mark.django_db
def test_jobs_without_a_key_stay_where_keys_are_blocked(alias, settings):
    """They have no key in common: a requeue of one of them is about that one."""
    settings.OUTBOX = {**settings.OUTBOX, "DEAD_KEY": "block"}
    first, *_ = dead_jobs(3, using=alias)
    assert requeue_dead(everything(alias).filter(pk=first.pk)).done == 1


@pytest.mark.django_db
def test_a_shard_that_the_table_would_refuse_is_put_right(alias):
    jobs = dead_jobs(2, using=alias)
    DeadJob.objects.using(alias).filter(pk=jobs[0].pk).update(shard=999)
    assert requeue_dead(everything(alias)).done == 2
    assert [row.shard for row in staged(alias)] == [job.shard for job in jobs]


@pytest.mark.django_db
def test_discarding_deletes_what_was_asked_for_and_stages_nothing(alias, in_twos, caplog):
    dead_jobs(5, using=alias, task="a")
    dead_jobs(1, using=alias, task="b")

    assert discard_dead(everything(alias).filter(task="a"), by="ann").done == 5

    assert len(is_dead(alias)) == 1
    assert not staged(alias)
    assert not Incident.objects.using(alias).exists()
    lines = [line for line in caplog.messages if line.endswith(" by=ann")]
    assert [line.split()[-2] for line in lines] == ["jobs=2", "jobs=2", "jobs=1"]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)
def test_a_snapshot_of_the_caller_does_not_make_it_run_for_ever(alias):
    """Rows that somebody else has taken stay visible in it."""
    dead_jobs(3, using=alias)
    other = connections.create_connection(alias)
    try:
        with connections[alias].cursor() as cursor:
            level = "SESSION CHARACTERISTICS AS" if other.vendor == "postgresql" else "SESSION"
            cursor.execute(f"SET {level} TRANSACTION ISOLATION LEVEL REPEATABLE READ")
        with transaction.atomic(using=alias):
            assert everything(alias).count() == 3
            with other.cursor() as cursor:
                cursor.execute("DELETE FROM outbox_deadjob")
            if other.vendor == "postgresql":
                with pytest.raises(Exception, match="serialize"):
                    requeue_dead(everything(alias))
                transaction.set_rollback(True, using=alias)
            else:
                assert requeue_dead(everything(alias)).done == 0
    finally:
        other.close()
        connections[alias].close()
    assert not staged(alias)


def test_a_copy_of_the_columns_is_complete():
    """A new column of a message must be requeued with it."""
    assert set(dead_row().copied()) == set(columns())
