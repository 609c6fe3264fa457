"""The status of the outbox: correct, bounded, and by the database's clock."""

from __future__ import annotations

from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import connections
from django.test.utils import CaptureQueriesContext

from outbox_app.database.clock import DatabaseNow
from outbox_app.jobs.dead_summary import dead_groups
from outbox_app.jobs.drain import status
from outbox_app.models import DeadJob, Incident, Lease, Process, StagedJob, counting
from outbox_app.text import one_line, shown

from .rows import dead_jobs, staged_jobs

pytestmark = pytest.mark.django_db


def drainer(alias, *, silent=-60.0, **columns):
    """Enter a drainer; by default one whose lease does not run out while a slow test looks."""
    row = Process.objects.using(alias).create(
        id=uuid4(), host="web-1", pid=7, lease_seconds=10, **columns
    )
    heartbeat = DatabaseNow() - timedelta(seconds=silent)
    Process.objects.using(alias).filter(pk=row.pk).update(heartbeat_at=heartbeat)
    return row


def hold(alias, job, **delay):
    rows = StagedJob.objects.using(alias).filter(pk=job.pk)
    rows.update(available_at=DatabaseNow() + timedelta(**delay))


def test_backlog_counts_ready_rows_and_the_age_of_the_oldest(alias):
    assert status.backlog(using=alias) == status.Backlog(rows=0, oldest_seconds=0.0)
    old, _, held = staged_jobs(3, using=alias)
    rows = StagedJob.objects.using(alias)
    rows.filter(pk=old.pk).update(staged_at=DatabaseNow() - timedelta(hours=2))
    rows.filter(pk=held.pk).update(
        available_at=DatabaseNow() + timedelta(days=1), staged_at=DatabaseNow() - timedelta(days=9)
    )
    found = status.backlog(using=alias)
    assert (found.rows, found.shown) == (2, "2")
    assert found.oldest_seconds == pytest.approx(7200, abs=60)


def test_the_oldest_is_found_in_whichever_shard_and_app(alias):
    leases = [Lease(resource="jobs", part=part) for part in range(128)]
    Lease.objects.using(alias).bulk_create(leases)
    assert status.backlog(using=alias).oldest_seconds == 0
    for minutes, (app, shard) in enumerate([("a", 5), ("b", 127), ("", 0), ("b", 3)]):
        [job] = staged_jobs(using=alias, app=app, shard=shard)
        moment = DatabaseNow() - timedelta(minutes=10 - minutes)
        StagedJob.objects.using(alias).filter(pk=job.pk).update(staged_at=moment)
    for minutes in (10, 9, 8, 7):
        found = status.backlog(using=alias)
        assert found.oldest_seconds == pytest.approx(minutes * 60, abs=50)
        assert found.rows == minutes - 6
        StagedJob.objects.using(alias).order_by("id").first().delete()


def test_a_job_that_was_held_waits_since_it_is_due(alias):
    leases = [Lease(resource="jobs", part=part) for part in range(128)]
    Lease.objects.using(alias).bulk_create(leases)
    for minutes, (app, shard) in ((1, ("a", 5)), (9, ("b", 127)), (-5, ("b", 127))):
        [job] = staged_jobs(using=alias, app=app, shard=shard)
        hold(alias, job, minutes=-minutes)
    found = status.backlog(using=alias)
    assert found.rows == 0
    assert found.oldest_seconds == pytest.approx(540, abs=50)


def test_counting_stops(alias, monkeypatch):
    monkeypatch.setattr(counting, "MANY", 3)
    staged_jobs(3, using=alias)
    assert status.backlog(using=alias).shown == "3"
    staged_jobs(5, using=alias)
    assert status.backlog(using=alias).rows == 4
    assert status.backlog(using=alias).shown == "3+"


def test_held_rows_by_when_they_are_due(alias):
    jobs = staged_jobs(7, using=alias)
    for job, delay in zip(
        jobs,
        [{"hours": -1}, {"minutes": 30}, {"minutes": 50}, {"hours": 2}, {"days": 3}, {"days": 9}],
        strict=False,
    ):
        hold(alias, job, **delay)
    assert status.held(using=alias) == status.Held(due=1, within_the_hour=2, later=3)


def test_drainers_with_their_shards_and_their_silence(alias):
    alive, silent = drainer(alias), drainer(alias, silent=100)
    owners = [alive.pk] * 60 + [silent.pk] * 40 + [None] * 20 + [uuid4()] * 8
    Lease.objects.using(alias).bulk_create(
        [Lease(resource="jobs", part=part, owner=owner) for part, owner in enumerate(owners)]
        + [Lease(resource="events", part=0, owner=alive.pk)]
    )
    found = {row.drainer.pk: row for row in status.drainers(using=alias)}
    assert (found[alive.pk].shards, found[alive.pk].is_silent) == (60, False)
    assert (found[silent.pk].shards, found[silent.pk].is_silent) == (40, True)
    assert found[silent.pk].silent_seconds == pytest.approx(100, abs=60)
    assert status.unowned_shards(list(found.values())) == list(range(100, 128))


def test_without_leases_every_shard_is_unowned(alias):
    assert status.drainers(using=alias) == []
    assert status.unowned_shards([]) == list(range(128))


def test_incidents_are_cut(alias, monkeypatch):
    monkeypatch.setattr(counting, "LISTED", 2)
    rows = [Incident(kind="unknown", first_id=n, last_id=n) for n in range(5)]
    Incident.objects.using(alias).bulk_create(rows)
    assert [row.first_id for row in status.incidents(using=alias)] == [4, 3]


def test_dead_jobs_by_task_and_error(alias):
    dead_jobs(1, using=alias, task="a", error="E", reason="old")
    dead_jobs(1, using=alias, task="a", error="E", reason="new")
    dead_jobs(3, using=alias, task="a", error="F")
    groups, is_all = dead_groups(DeadJob.objects.using(alias))
    assert [(g.task, g.error, g.count, g.reason) for g in groups] == [
        ("a", "F", 3, "The broker said no."),
        ("a", "E", 2, "new"),
    ]
    assert is_all


def test_only_the_newest_dead_jobs_are_grouped(alias, monkeypatch):
    monkeypatch.setattr(counting, "MANY", 4)
    dead_jobs(5, using=alias, task="old")
    dead_jobs(3, using=alias, task="new")
    groups, is_all = dead_groups(DeadJob.objects.using(alias))
    assert [(group.task, group.count) for group in groups] == [("new", 3), ("old", 1)]
    assert not is_all


def test_the_number_of_statements_does_not_depend_on_the_rows(alias):
    def statements():
        with CaptureQueriesContext(connections[alias]) as queries:
            status.backlog(using=alias)
            status.held(using=alias)
            status.drainers(using=alias)
            status.incidents(using=alias)
            dead_groups(DeadJob.objects.using(alias))
        return len(queries)

    dead_jobs(1, using=alias)
    staged_jobs(1, using=alias)
    before = statements()
    for number in range(30):
        dead_jobs(2, using=alias, task=f"t{number}")
        staged_jobs(2, using=alias)
        drainer(alias)
    assert statements() == before <= 19


def test_text_is_made_harmless():
    assert shown("tab\tline\nend") == "tab\tline\nend"
    assert shown("\x1b[31m\x00\r\x7f\x9b\u202e\u2028\ud800") == (
        r"\x1b[31m\x00\r\x7f\x9b\u202e\u2028\ud800"
    )
    assert shown("naïve ключ 🙂") == "naïve ключ 🙂"
    assert shown("x" * 20, 5) == "xxxxx…"
    assert shown(b"\x00") == r"b'\x00'"
    assert one_line("a\r\n  b\x1b", 10) == r"a\r b\x1b"
    assert one_line("x " * 50, 4) == "x x …"
    assert one_line(f"a {' ' * 50} b", 10) == "a…"
    assert one_line(f"a{' ' * 50}", 10) == "a"
