"""The counters of drainers: each job is counted once, under the right name, with any outcome."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import OperationalError, connections, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from outbox_app.capability import all_doors
from outbox_app.database.clock import DatabaseNow
from outbox_app.jobs.drain.drain import Drain
from outbox_app.models import Process, StagedJob, Statistic
from outbox_app.monitoring import series
from tests import tasks

from .planted import totals

pytestmark = pytest.mark.django_db(transaction=True)

COUNTED = ("published", "dead")


def drained(drain, jobs):
    """Turn until so many jobs have left."""
    while drain.tally.done < jobs:
        drain.run_once()


def counted(alias, **only):
    found = totals(alias, **only)
    return tuple(int(found.get(name, 0)) for name in COUNTED)


def by_delay(alias):
    rows = totals(alias, name="delay", dimension="le")
    return {name.removeprefix("delay "): int(value) for name, value in rows.items()}


def waiting_since(alias, **ago):
    StagedJob.objects.using(alias).update(staged_at=DatabaseNow() - timedelta(**ago))


def test_names_fit():
    names = [name for doors in all_doors() for name in doors.counters]
    assert all(len(name) <= Statistic._meta.get_field("name").max_length for name in names)


@pytest.mark.parametrize("broker", ["memory", "redis", "rabbitmq"])
def test_a_run_leaves_what_it_did(alias, make_app, broker, request):
    url = "memory://" if broker == "memory" else request.getfixturevalue(f"{broker}_url")
    note = make_app(url).task(name="note")(tasks.note)
    with transaction.atomic(using=alias):
        for i in range(25):
            note.delay("", i)
        for i in range(3):
            note.apply_async(("", i), expires=timezone.now() - timedelta(seconds=5))
        damaged = note.delay("", 0)
        note.apply_async(("", 1), countdown=3600)
    StagedJob.objects.using(alias).filter(task_id=damaged.id).update(envelope="nonsense")

    drain = Drain(using=alias)
    assert drain.run(once=True).done == 29

    assert counted(alias) == (28, 1)
    assert sum(by_delay(alias).values()) == 28
    # The first sample was taken before the first batch; a minute may have begun since.
    rows = Statistic.objects.using(alias).exclude(name="delay").order_by("-minute")
    found = {row.name: row.value for row in rows}
    assert found["ready"] == 29
    sources = Statistic.objects.using(alias).values_list("source", flat=True).distinct()
    assert list(sources) == [str(drain.holder.id)]


def test_minutes_are_those_of_the_databases_clock(alias, stage, drainer, monkeypatch):
    stage(3)
    drain = drainer()
    now = series._now(alias)
    monkeypatch.setattr(timezone, "now", lambda: now + timedelta(hours=2))
    drained(drain, 3)
    drain._counters.write()
    begun = Statistic.objects.using(alias).order_by("minute").values_list("minute", flat=True)
    assert now - timedelta(minutes=2) < begun[0] <= now + timedelta(minutes=2)
    assert all((minute.second, minute.microsecond) == (0, 0) for minute in begun)


def test_two_drainers_add_up(alias, stage, drainer):
    one, other = drainer(), drainer()
    for drain in (one, other, one, other):  # one gives up half of its shards
        drain.holder._shared_at = float("-inf")
        drain.run_once()
    stage(200)
    while StagedJob.objects.using(alias).exists():
        one.run_once()
        other.run_once()
    for drain in (one, other):
        drain._counters.write()

    assert one.tally.published + other.tally.published == 200
    for drain in (one, other):
        assert drain.tally.published
        done = counted(alias, source=str(drain.holder.id))
        assert done == (drain.tally.published, 0)
    assert sum(series.series(using=alias).published) == 200
    assert sum(series.rates(using=alias).values()) > 0
    assert sum(by_delay(alias).values()) == 200


@pytest.mark.parametrize(
    ("ago", "bucket"), [({"seconds": 100}, "300"), ({"minutes": 10}, "900"), ({"hours": 9}, "+Inf")]
)
def test_the_delay_counts_from_when_a_job_was_staged(alias, stage, drainer, ago, bucket):
    stage(3)
    waiting_since(alias, **ago)
    drain = drainer()
    drained(drain, 3)
    drain._counters.write()
    assert by_delay(alias) == {bucket: 3}


def test_the_delay_of_a_held_job_counts_from_when_it_was_held_until(alias, stage, drainer):
    stage(2, countdown=3600)
    waiting_since(alias, hours=9)
    due = DatabaseNow() - timedelta(seconds=100)
    StagedJob.objects.using(alias).update(available_at=due)
    drain = drainer()
    drained(drain, 2)
    drain._counters.write()
    assert by_delay(alias) == {"300": 2}


def test_the_delay_of_a_large_message_is_known_as_well(alias, note, drainer):
    with transaction.atomic(using=alias):
        note.delay("", "x" * 100_000)
    waiting_since(alias, seconds=100)
    drain = drainer()
    drained(drain, 1)
    drain._counters.write()
    assert by_delay(alias) == {"300": 1}


def test_a_job_with_a_time_out_of_this_world_leaves_as_any_other(alias, stage, drainer):
    stage(2)
    nonsense = {"sqlite": "'nonsense'", "postgresql": "'-infinity'", "mysql": "'1000-01-01'"}[
        connections[alias].vendor
    ]
    with connections[alias].cursor() as cursor:
        cursor.execute(f"UPDATE outbox_stagedjob SET staged_at = {nonsense}, shard = 1")
    drain = drainer()
    drain.holder.join()
    drain.holder.owned -= {0}  # Django cannot read such a time, so there is no sample of it
    drained(drain, 2)
    drain._counters.write()
    assert counted(alias) == (2, 0)
    assert sum(by_delay(alias).values()) == 2


def test_it_writes_every_ten_seconds_and_a_crash_loses_what_is_unwritten(
    alias, stage, drainer, due
):
    stage(10)
    drain = drainer()
    drained(drain, 10)
    drain.run_once()
    assert not Statistic.objects.using(alias).exists()
    due(drain)
    drain.run_once()
    assert counted(alias) == (10, 0)
    stage(7)
    drained(drain, 17)
    drain.run_once()
    assert counted(alias) == (10, 0)  # and here it is killed: no stop(), no last write

    drain.holder.leave()
    stage(5)
    Drain(using=alias).run(once=True)
    assert counted(alias) == (15, 0)


def test_nothing_is_written_where_nothing_has_changed(alias, stage, drainer, due):
    stage(10)
    drain = drainer()
    drained(drain, 10)
    drain._counters.write()
    written = list(Statistic.objects.using(alias).values())
    due(drain)
    drain.holder.owned = frozenset(range(1, 128))  # no samples
    with CaptureQueriesContext(connections[alias]) as statements:
        drain.run_once()
        drain._counters.write()
    assert not [each for each in statements if "outbox_statistic" in each["sql"]]
    assert list(Statistic.objects.using(alias).values()) == written


def test_a_write_that_fails_disturbs_nothing_and_is_made_up_for(alias, stage, drainer, due, caplog):
    def refuse(execute, sql, *args):
        if "outbox_statistic" in sql:
            raise OperationalError("refused on purpose")
        return execute(sql, *args)

    stage(20)
    drain = drainer()
    with connections[alias].execute_wrapper(refuse):
        while drain.tally.done < 20:
            due(drain)
            drain.run_once()
        due(drain)
        drain.run_once()
        stage(5)
        drain.run(once=True)
    assert drain.tally.published == 25
    assert not drain.trouble
    assert not StagedJob.objects.using(alias).exists()
    assert not Statistic.objects.using(alias).exists()
    said = [record for record in caplog.records if "counters of" in record.getMessage()]
    assert len(said) == 1

    drain._counters.write()
    assert counted(alias) == (25, 0)


@pytest.mark.parametrize("jobs", [10, 900])
def test_a_write_is_one_insert_however_many_jobs(alias, stage, drainer, jobs):
    stage(jobs)
    drain = drainer()
    drained(drain, jobs)
    with CaptureQueriesContext(connections[alias]) as statements:
        drain._counters.write()
    # A transaction of its own, and a bound for how long it waits.
    assert len(statements) <= 5
    written = [each["sql"] for each in statements if "INSERT" in each["sql"]]
    assert len(written) == 1
    assert not [each for each in statements if "outbox_stagedjob" in each["sql"]]


def test_inside_the_transaction_of_somebody_else_nothing_is_written(alias, stage, drainer, due):
    stage(10)
    drain = drainer()
    drained(drain, 10)
    with transaction.atomic(using=alias):
        drain._counters.write()
    assert not Statistic.objects.using(alias).exists()
    drain._counters.write()
    assert counted(alias) == (10, 0)


def test_a_drainer_that_lost_its_place_goes_on_as_a_new_one(alias, stage, drainer):
    drain = drainer()
    stage(5)
    drained(drain, 5)
    before = drain.holder.id
    drain._counters.write()
    drain.holder.leave()
    stage(4)
    drained(drain, 9)
    drain._counters.write()
    assert counted(alias, source=str(before)) == (5, 0)
    assert counted(alias, source=str(drain.holder.id)) == (4, 0)


def test_what_a_monitor_adds_up_never_falls(alias, stage, drainer):
    """The row of a drainer that lost its lease is gone; a new one that begins at 0 would be added
    to the old one's number."""
    drain = drainer()
    stage(5)
    drained(drain, 5)
    drain.holder.leave()
    drain.run_once()
    [row] = Process.objects.using(alias)
    assert (row.pk, row.done) == (drain.holder.id, 5)
