"""One query reads the ids of many batches: when the drain has to query again."""

from __future__ import annotations

import json
import time
from contextlib import suppress
from datetime import timedelta

import pytest
from django.db import OperationalError, connections, transaction
from django.test.utils import CaptureQueriesContext

from outbox_app.database.clock import DatabaseNow
from outbox_app.jobs.drain import batch
from outbox_app.jobs.drain.batch import BatchReader
from outbox_app.jobs.drain.drain import Drain
from outbox_app.jobs.drain.outcome import PublishResult
from outbox_app.jobs.drain.publisher import Publisher
from outbox_app.models import Incident, StagedJob
from tests import tasks

from .test_main_path import received

pytestmark = pytest.mark.django_db(transaction=True)
ALL = range(128)
#: Of four keys in turns, so that each batch of three has some of the keys of the one before.
JOBS = [10 * number + key for number in range(6) for key in range(4)]


@pytest.fixture(autouse=True)
def a_look_serves_for_ever(monkeypatch):
    """The ids of a query never expire, on any slow machine."""
    monkeypatch.setattr(batch, "SERVES", 1e9)


@pytest.fixture
def note(make_app):
    return make_app().task(name="note")(tasks.note)


@pytest.fixture
def reader(alias, note):
    return BatchReader(using=alias, app=note.app.main, batch_size=2)


def stage(note, alias, numbers, **options):
    """Stage a job for each number, of a key and a shard by its last digit."""
    with transaction.atomic(using=alias):
        for number in numbers:
            note.apply_async(("", number), ordering_key=str(number % 10), **options)


def numbers(rows):
    return [json.loads(row.body)[0][1] for row in rows]


def read(reader, **options):
    """Read a batch, and delete it as if it had been accepted. Returns its numbers."""
    rows = reader.read(ALL, **options)
    batch.delete([(row.id, row.task_id) for row in rows], using=reader.using)
    return numbers(rows)


def test_batches_of_one_look_are_a_statement_each(alias, note, reader):
    with transaction.atomic(using=alias):
        for number in range(8):  # each in a shard of its own
            note.apply_async(("", number), task_id=f"id-{number}")
    first = numbers(reader.read(ALL))

    with CaptureQueriesContext(connections[alias]) as statements:
        found = [numbers(reader.read(ALL, go_on=True)) for _ in range(3)]

    assert [first, *found] == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert len(statements) == 3
    assert numbers(reader.read(ALL, go_on=True)) == first  # they were not deleted: a new look


@pytest.mark.parametrize(("serves", "found"), [(0, [4, 2]), (1e9, [2, 3])])
def test_a_look_serves_for_a_time(alias, note, reader, monkeypatch, serves, found):
    monkeypatch.setattr(batch, "SERVES", serves)
    stage(note, alias, range(4))
    assert read(reader) == [0, 1]
    stage(note, alias, [4])  # it commits late, and has a low id
    StagedJob.objects.using(alias).filter(ordering_key="4").update(id=1)
    assert read(reader, go_on=True) == found


def test_new_rows_of_another_shard_wait_for_one_look_and_not_for_a_backlog(
    alias, note, reader, monkeypatch
):
    monkeypatch.setattr(batch, "FEW", 4)
    monkeypatch.setattr(batch, "MOST", 4)
    stage(note, alias, range(0, 500, 10))
    assert read(reader) == [0, 10]
    stage(note, alias, [1])
    found = []
    while 1 not in found:
        found += read(reader, go_on=True)
    assert len(found) <= 2 + 4 + 1  # the rest of its look, and the next one


def test_looks_grow_while_they_are_used_up(alias, note, reader, monkeypatch):
    monkeypatch.setattr(batch, "FEW", 4)
    monkeypatch.setattr(batch, "MOST", 8)
    reader.batch_size = 1000
    stage(note, alias, range(0, 500, 10))
    assert [len(read(reader, go_on=True)) for _ in range(8)] == [4, 8, 8, 8, 8, 8, 6, 0]
    stage(note, alias, range(0, 100, 10))
    assert [len(read(reader, go_on=True)) for _ in range(3)] == [4, 6, 0]
    stage(note, alias, range(0, 100, 10))
    assert len(reader.read(ALL)) == 4
    reader.batch_size = 2
    assert len(reader.read(ALL)) == 2
    assert len(reader.read(ALL)) == 2  # the look is given up
    assert len(reader._ids) == 2


def test_rows_of_shards_that_were_lost_are_not_read(alias, note, reader):
    stage(note, alias, range(6))
    assert read(reader) == [0, 1]
    lost = StagedJob.objects.using(alias).get(ordering_key="2").shard
    assert numbers(reader.read({*ALL} - {lost}, go_on=True)) == [3]


def test_shards_that_were_lost_and_are_back_are_looked_at_anew(alias, note, reader):
    stage(note, alias, [0, 1, 2, 12, 22, 3, 32, 42])
    assert read(reader) == [0, 1]
    lost = StagedJob.objects.using(alias).filter(ordering_key="2").first().shard
    reader.batch_size = 4  # which passes over three of the shard, and leaves two of it
    assert numbers(reader.read({*ALL} - {lost}, go_on=True)) == [3]
    assert numbers(reader.read(ALL, go_on=True)) == [2, 12, 22, 3]


def test_a_drainer_that_owns_no_shard_reads_nothing(alias, note, reader):
    stage(note, alias, range(4))
    assert reader.read([]) == []


def test_ids_that_are_given_out_again_are_no_rows_of_the_look(alias, note, reader):
    stage(note, alias, range(6))
    assert read(reader) == [0, 1]
    StagedJob.objects.using(alias).filter(ordering_key="2").update(app="another")
    assert read(reader, go_on=True) == [3]


def test_what_is_held_or_gone_after_the_look_is_not_read(alias, note, reader):
    stage(note, alias, range(8))
    assert read(reader) == [0, 1]
    held, gone, *_ = StagedJob.objects.using(alias).order_by("id")
    StagedJob.objects.using(alias).filter(pk=held.pk).update(
        available_at=DatabaseNow() + timedelta(hours=1)
    )
    gone.delete()
    assert read(reader, go_on=True) == [4, 5]


def test_jobs_that_are_due_are_read_with_those_that_are_ready(alias, note, reader):
    stage(note, alias, [0], countdown=3600)
    stage(note, alias, [1])
    assert read(reader) == [1]
    StagedJob.objects.using(alias).update(available_at=DatabaseNow() - timedelta(seconds=1))
    stage(note, alias, [2])
    assert read(reader) == [0, 2]


@pytest.mark.slow
@pytest.mark.parametrize("alias", ["default"], ids=["sqlite"], indirect=True)
def test_no_job_overtakes_one_of_its_key_while_the_clock_goes_on(alias, note, reader):
    """SQLite takes the time of a statement once for each place that has it in its text."""
    reader.batch_size = 3
    stage(note, alias, [0], countdown=3600)
    stage(note, alias, [11])
    stage(note, alias, [21], countdown=3600)
    held = StagedJob.objects.using(alias).filter(available_at__isnull=False)
    held.update(available_at=DatabaseNow() - timedelta(seconds=1))
    connection = connections[alias].connection
    connection.set_progress_handler(lambda: time.sleep(0.002), 1)  # each step takes 2 ms
    found = numbers(reader.read(ALL))
    connection.set_progress_handler(None, 1)
    assert found == [0, 11, 21]


@pytest.fixture
def drain(alias, note):
    stage(note, alias, JOBS)
    drain = Drain(using=alias, batch_size=3, lease_seconds=600)  # no heartbeat in between
    yield drain
    drain.holder.leave()


def of_keys(numbers):
    """Return numbers by key, in their order."""
    return {key: [n for n in numbers if n % 10 == key] for key in range(4)}


def order(note):
    return of_keys([message.payload[0][1] for message in received(note.app)])


def fail_second(monkeypatch, fail):
    """Have the second batch published by another function, which may call the first one."""
    publish, calls = Publisher.publish, []

    def second_fails(self, rows, **options):
        calls.append(rows)
        if len(calls) == 2:
            return fail(lambda: publish(self, rows, **options), rows)
        return publish(self, rows, **options)

    monkeypatch.setattr(Publisher, "publish", second_fails)


def drained(drain):
    """Run turns until all have left; what a turn raises is passed over."""
    for _ in range(30):
        with suppress(OperationalError):
            drain.run_once()
        for app in drain._apps.values():
            app.backoff.succeeded()
    return drain.tally.published


def test_a_broker_that_goes_away_changes_no_order(drain, note, monkeypatch):
    fail_second(monkeypatch, lambda publish, rows: PublishResult(error=OSError("away")))
    assert drained(drain) == len(JOBS)
    assert order(note) == of_keys(JOBS)


def test_one_row_that_stays_changes_no_order(drain, note, monkeypatch):
    stayed = []

    def may_have_been_taken(publish, rows):
        result = publish()
        result.unknown = [result.accepted.pop()]
        stayed.extend(numbers(result.unknown))
        return result

    fail_second(monkeypatch, may_have_been_taken)
    assert drained(drain) == len(JOBS)
    # It goes again, before those behind it.
    [twice] = stayed
    expected = [number for n in JOBS for number in ([n, n] if n == twice else [n])]
    assert order(note) == of_keys(expected)
    assert Incident.objects.using(drain.using).get().kind == Incident.Kind.UNKNOWN


@pytest.mark.parametrize("word", ["DELETE", "SELECT"])
def test_a_database_that_fails_changes_no_order(drain, note, word):
    class Once:
        def __call__(self, execute, sql, params, many, context):
            is_ours = "outbox_stagedjob" in sql and drain.tally.published == 6
            if is_ours and sql.lstrip("(").startswith(word) and not hasattr(self, "failed"):
                self.failed = True
                raise OperationalError("on purpose")
            return execute(sql, params, many, context)

    failing = Once()
    with connections[drain.using].execute_wrapper(failing):
        assert drained(drain) == len(JOBS)
    assert failing.failed
    assert order(note) == of_keys(JOBS)


def test_a_drainer_that_fails_between_reading_and_publishing_reads_the_batch_again(
    drain, note, monkeypatch
):
    from outbox_app.jobs.drain import drain as module

    blocked, calls = module.blocked_by_dead, []

    def second_fails(rows, **options):
        calls.append(rows)
        if len(calls) == 2:
            raise OperationalError("on purpose")
        return blocked(rows, **options)

    monkeypatch.setattr(module, "blocked_by_dead", second_fails)
    assert drained(drain) == len(JOBS)
    assert order(note) == of_keys(JOBS)


@pytest.mark.parametrize("alias", ["mariadb"], indirect=True)
def test_the_first_batch_with_keys_has_the_ids_looked_for_again(alias, note, reader):
    """Though the look had served a batch without keys before."""
    with transaction.atomic(using=alias):
        for number in range(2):
            note.delay("", number)
    stage(note, alias, [2, 3, 4])
    assert numbers(reader.read(ALL)) == [0, 1]
    rows = StagedJob.objects.using(alias).order_by("id")
    batch.delete(list(rows.values_list("id", "task_id")[:2]), using=alias)
    # As if the view of the look had not shown it.
    reader._ids.remove(rows[0].id)
    assert numbers(reader.read(ALL, go_on=True)) == [2, 3]


def test_a_drainer_goes_on_with_its_look(drain, monkeypatch):
    monkeypatch.setattr(drain._counters, "keep", lambda: None)
    drain.run_once()
    with CaptureQueriesContext(connections[drain.using]) as statements:
        drain.run_once()
    assert drain.tally.published == 6
    assert len(statements) == 2  # rows by their ids, DELETE
    drained(drain)


def test_what_is_held_by_now_is_not_read_though_a_look_had_found_it(alias, note, reader):
    """Under its id there is another job, say, or the database's clock was set back."""
    stage(note, alias, range(5))
    assert read(reader) == [0, 1]
    later = DatabaseNow() + timedelta(hours=1)
    StagedJob.objects.using(alias).filter(ordering_key="2").update(available_at=later)
    assert read(reader, go_on=True) == [3]


def test_a_batch_that_others_have_taken_is_passed_over(alias, note, reader):
    stage(note, alias, range(6))
    assert read(reader) == [0, 1]
    StagedJob.objects.using(alias).filter(ordering_key__in=["2", "3"]).delete()
    with CaptureQueriesContext(connections[alias]) as statements:
        assert read(reader, go_on=True) == [4, 5]
    assert len(statements) == 3  # two batches of the look, and the deletion


def test_rows_that_are_left_out_hold_up_no_other_of_their_shard(alias, note, reader, monkeypatch):
    """An open transaction may have cancelled more jobs of a key than a look takes of a shard."""
    monkeypatch.setattr(batch, "FEW", 4)
    stage(note, alias, range(0, 70, 10))
    stage(note, alias, range(1, 200, 10))
    first = dict(StagedJob.objects.using(alias).order_by("id").values_list("id", "shard")[:5])
    assert numbers(reader.read(ALL, but=first)) == [50, 60]
    assert reader._found == 2 + 4  # a look takes no more of the other shards
