"""Dead jobs by task and by error over the last hours and days."""

from __future__ import annotations

from datetime import timedelta

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from outbox_app.database.clock import DatabaseNow
from outbox_app.jobs import dead_summary as module
from outbox_app.jobs.dead_summary import WINDOWS, dead_matrix
from outbox_app.models import DeadJob, counting
from tests.jobs.dead.rows import dead_jobs

pytestmark = pytest.mark.django_db


def died(alias, ago, **columns):
    [job] = dead_jobs(using=alias, **columns)
    DeadJob.objects.using(alias).filter(pk=job.pk).update(died_at=DatabaseNow() - ago)


def rows(found):
    return [(row.name, row.counts, row.total) for row in found]


def test_each_window_holds_the_ones_before_it(alias):
    for ago in (0, 2, 20, 50, 100, 200):
        died(alias, timedelta(hours=ago), task="a", error="E")
    died(alias, timedelta(hours=2), task="a", error="F", reason="no route")
    died(alias, timedelta(hours=2), task="b", error="F", reason="newest")
    found = dead_matrix(using=alias)
    assert list(WINDOWS) == ["1h", "3h", "24h", "3d", "7d"]
    assert rows(found.tasks) == [("a", (1, 3, 4, 5, 6), 7), ("b", (0, 1, 1, 1, 1), 1)]
    assert rows(found.errors) == [("E", (1, 2, 3, 4, 5), 6), ("F", (0, 2, 2, 2, 2), 2)]
    assert found.errors[1].reason == "newest"
    assert found.total == 8
    assert found.complete


def test_nothing_is_dead(alias):
    found = dead_matrix(using=alias)
    assert (found.tasks, found.errors, found.total, found.complete) == ([], [], 0, True)


def test_only_so_many_are_looked_at_and_it_says_so(alias, monkeypatch):
    dead_jobs(3, using=alias, task="old")
    dead_jobs(4, using=alias, task="new")
    monkeypatch.setattr(counting, "MANY", 4)
    found = dead_matrix(using=alias)
    assert [row.name for row in found.tasks] == ["new"]
    assert found.total == 5, "counted up to MANY + 1"
    assert not found.complete
    monkeypatch.setattr(counting, "MANY", 7)
    assert dead_matrix(using=alias).complete


@pytest.mark.parametrize(("where", "name"), [(counting, "LISTED"), (module, "PAIRS")])
def test_the_most_frequent_are_listed(alias, monkeypatch, where, name):
    dead_jobs(1, using=alias, task="seldom", error="x")
    dead_jobs(3, using=alias, task="often", error="x")
    monkeypatch.setattr(where, name, 1)
    found = dead_matrix(using=alias)
    assert [row.name for row in found.tasks] == ["often"]
    assert not found.complete


def test_all_are_counted_though_few_pairs_are_looked_at(alias, monkeypatch):
    for number in range(4):
        dead_jobs(2, using=alias, task=f"t{number}", error="x")
    monkeypatch.setattr(module, "PAIRS", 1)
    assert dead_matrix(using=alias).total == 8


def test_it_takes_three_statements_whatever_there_is(alias):
    for number in range(30):
        dead_jobs(2, using=alias, task=f"t{number}", error=f"e{number % 7}")
    with CaptureQueriesContext(connections[alias]) as queries:
        dead_matrix(using=alias)
    assert len(queries) == 3
