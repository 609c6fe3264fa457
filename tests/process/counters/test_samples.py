"""Samples of the job table: one per minute, by one drainer, at a bounded cost."""

from __future__ import annotations

import pytest
from django.db import OperationalError, connections
from django.test.utils import CaptureQueriesContext

from outbox_app.jobs.drain import drain_counters
from outbox_app.models import Statistic
from outbox_app.models.counting import counted
from tests.jobs.dead.rows import staged_jobs

from .planted import NOW, totals

pytestmark = pytest.mark.django_db(transaction=True)

SAMPLES = ("ready",)


def minute_of(drain, number):
    """Let it be half past this minute, for the drainer, and stay so."""
    stopped = drain.holder.clock()
    drain.holder.clock = lambda: stopped
    drain.holder._same_moment = NOW.replace(minute=number), stopped


@pytest.fixture
def sampler(drainer):
    """A drainer that owns every shard and has counted nothing yet."""
    drain = drainer()
    drain.holder.join()
    return drain


def sampled(alias, minute):
    rows = Statistic.objects.using(alias).filter(minute=NOW.replace(minute=minute, second=0))
    return {row.name: row.value for row in rows if row.name in SAMPLES}


def test_one_sample_a_minute(alias, stage, sampler):
    minute_of(sampler, 5)
    stage(4)
    sampler._counters.keep()
    stage(9)
    sampler._counters.keep()  # the same minute
    minute_of(sampler, 6)
    stage(2, countdown=3600)
    sampler._counters.keep()
    sampler._counters.write()
    assert sampled(alias, 5) == {"ready": 4}
    assert sampled(alias, 6) == {"ready": 13}


def test_only_the_owner_of_shard_0_takes_samples(alias, stage, drainer):
    one, other = drainer(), drainer()
    for drain in (one, other, one, other):
        drain.holder._shared_at = float("-inf")
        drain.holder.share()
    [without] = [drain for drain in (one, other) if 0 not in drain.holder.owned]
    [with_it] = {one, other} - {without}
    for drain in (one, other):
        drain._counters.keep()
        drain._counters.write()
    rows = Statistic.objects.using(alias).filter(name__in=SAMPLES)
    assert {row.source for row in rows} == {str(with_it.holder.id)}

    with_it.holder.leave()
    without.holder._shared_at = float("-inf")
    without.holder.share()
    without._counters.keep()
    without._counters.write()
    assert {row.source for row in rows.all()} == {str(one.holder.id), str(other.holder.id)}


def test_counting_stops(alias, monkeypatch, sampler):
    monkeypatch.setattr(drain_counters, "counted", lambda rows: counted(rows, limit=3))
    staged_jobs(5, using=alias)
    sampler._counters.keep()
    sampler._counters.write()
    assert totals(alias, name="ready") == {"ready": 4}


@pytest.mark.parametrize("jobs", [0, 1, 300])
def test_a_sample_is_a_bounded_number_of_statements(alias, sampler, jobs):
    staged_jobs(jobs, using=alias)
    minute_of(sampler, 5)
    with CaptureQueriesContext(connections[alias]) as statements:
        sampler._counters.keep()
    # Two looks for apps; ready; whether there is old.
    assert len(statements) <= 5
    with CaptureQueriesContext(connections[alias]) as statements:
        sampler._counters.keep()
    assert not statements.captured_queries  # until the next minute


@pytest.mark.parametrize("written", ["nonsense", "0000-00-00 00:00:00", "infinity"])
def test_a_row_without_a_readable_time_stops_no_drainer(alias, stage, sampler, written):
    stage(3)
    connection = connections[alias]
    with connection.cursor() as cursor:
        if connection.vendor == "mysql":
            cursor.execute("SELECT @@sql_mode")
            [mode] = cursor.fetchone()
            cursor.execute("SET sql_mode = ''")
        value = "infinity" if connection.vendor == "postgresql" else written
        cursor.execute("UPDATE outbox_stagedjob SET staged_at = %s", [value])
        if connection.vendor == "mysql":
            cursor.execute("SET sql_mode = %s", [mode])
    minute_of(sampler, 5)
    while sampler.tally.done < 3:
        sampler.run_once()
    assert not sampler.trouble


def test_a_sample_that_fails_disturbs_nothing(alias, stage, sampler, caplog):
    def refuse(execute, sql, *args):
        if "COUNT(" in sql:
            raise OperationalError("refused on purpose")
        return execute(sql, *args)

    stage(5)
    minute_of(sampler, 5)
    with connections[alias].execute_wrapper(refuse):
        while sampler.tally.done < 5:
            sampler.run_once()
    assert not sampler.trouble
    assert "samples of" in caplog.text
    minute_of(sampler, 6)
    sampler._counters.keep()
    sampler._counters.write()
    assert sampled(alias, 5) == {}
    assert set(sampled(alias, 6)) == set(SAMPLES)
