"""Without ``USE_TZ``: jobs that are held until a time in the hour that occurs twice.

The clock of the database is that of a project in Berlin: in the last night of October it shows the
time from 2 to 3 o'clock twice, first in summer time.
"""

from __future__ import annotations

import os
from datetime import UTC, datetime, timedelta
from itertools import pairwise
from zoneinfo import ZoneInfo

import pytest
from django.db import connections, transaction
from django.utils import timezone

from outbox_app import reschedule
from outbox_app.checks.databases import check_databases
from outbox_app.jobs.dead import requeue_dead
from outbox_app.jobs.staging import validation
from outbox_app.models import DeadJob, StagedJob
from tests import tasks
from tests.django_tasks.declared import add
from tests.servers.mysql import MARIADB

pytestmark = pytest.mark.django_db(transaction=True)
ZONE = ZoneInfo("Europe/Berlin")
HOUR, MINUTE = timedelta(hours=1), timedelta(minutes=1)


def back():
    """The moment from which on the next hour is the second one."""
    this = datetime.now(UTC)
    ends = [datetime(this.year + n, 11, 1, 1, tzinfo=UTC) for n in (0, 1)]
    sundays = [end - timedelta(days=end.isoweekday() % 7 or 7) for end in ends]
    return next(sunday for sunday in sundays if sunday > this + timedelta(days=2))


BACK = back()


@pytest.fixture
def berlin(alias, settings, monkeypatch):
    """The project, and the sessions of the database, are in Berlin. The server knows the zone."""
    settings.USE_TZ, settings.TIME_ZONE = False, "Europe/Berlin"
    settings.OUTBOX = {**settings.OUTBOX, "DATABASE": alias}
    monkeypatch.setattr(validation, "MAX_ETA", timedelta(days=400))
    connections[alias].close()  # PostgreSQL's session gets the zone of the settings
    if alias != MARIADB:
        yield
        connections[alias].close()
        return
    name = f"Berlin_{os.getpid()}"
    changes = [datetime(2020, 1, 1, tzinfo=UTC) + n * HOUR for n in range(24 * 366 * 10)]
    with connections[alias].cursor() as cursor:
        cursor.execute("INSERT INTO mysql.time_zone (Use_leap_seconds) VALUES ('N')")
        id = cursor.lastrowid
        cursor.execute("INSERT INTO mysql.time_zone_name VALUES (%s, %s)", [name, id])
        for kind in (0, 1):
            cursor.execute(
                "INSERT INTO mysql.time_zone_transition_type VALUES (%s, %s, %s, %s, %s)",
                [id, kind, 3600 * (1 + kind), kind, ("CET", "CEST")[kind]],
            )
        for before, at in pairwise(changes):
            kind = int(at.astimezone(ZONE).utcoffset() / HOUR) - 1
            if before.astimezone(ZONE).utcoffset() != at.astimezone(ZONE).utcoffset():
                cursor.execute(
                    "INSERT INTO mysql.time_zone_transition VALUES (%s, %s, %s)",
                    [id, int(at.timestamp()), kind],
                )
        cursor.execute("SET SESSION time_zone = %s", [name])
    yield
    connections[alias].close()
    with connections[alias].cursor() as cursor:
        for table in ("", "_name", "_transition", "_transition_type"):
            cursor.execute(f"DELETE FROM mysql.time_zone{table} WHERE Time_zone_id = %s", [id])


def is_due(alias, now):
    """Whether the one job is due when it is ``now``, to the database's clock."""
    rows = StagedJob.objects.using(alias)
    if alias == "postgres":
        return rows.filter(available_at__lte=now).exists()
    if alias == "default":
        return rows.filter(available_at__lte=timezone.make_naive(now, UTC)).exists()
    with connections[alias].cursor() as cursor:
        cursor.execute("SET SESSION timestamp = %s", [now.timestamp()])
    try:
        return rows.due().exists()
    finally:
        with connections[alias].cursor() as cursor:
            cursor.execute("SET SESSION timestamp = DEFAULT")


def by_delay(alias, task, due):
    with transaction.atomic(using=alias):
        task.apply_async(("", 1), eta=due)


def by_reschedule(alias, task, due):
    with transaction.atomic(using=alias):
        id = task.apply_async(("", 1), countdown=86400).id
    assert reschedule(id, eta=due, using=alias)


def by_requeue(alias, task, due):
    by_delay(alias, task, due)
    job = StagedJob.objects.using(alias).get()
    job.as_dead(error="E", reason="r").save(using=alias)
    job.delete()
    requeue_dead(DeadJob.objects.using(alias).all())


def by_run_after(alias, task, due):
    with transaction.atomic(using=alias):
        add.using(run_after=timezone.make_naive(due, ZONE)).enqueue(1)


@pytest.mark.usefixtures("berlin", "backend")
@pytest.mark.parametrize("hold", [by_delay, by_reschedule, by_requeue, by_run_after])
@pytest.mark.parametrize("minutes", [-90, -30, 0, 30, 59, 60, 90])
def test_a_job_leaves_when_it_is_due(alias, app, hold, minutes):
    task, due = app.task(name="note")(tasks.note), BACK + minutes * MINUTE
    hold(alias, task, due)
    assert not [n for n in range(150) if n and is_due(alias, due - n * MINUTE)]
    # MariaDB's clock shows each time of the second hour twice: it ends an hour at most too late.
    is_second = alias == MARIADB and 0 <= minutes < 60
    assert is_due(alias, BACK + HOUR if is_second else due)


@pytest.mark.usefixtures("berlin")
@pytest.mark.parametrize("eta", [datetime.fromtimestamp(0, UTC), datetime.min.replace(tzinfo=UTC)])
def test_a_job_that_is_rescheduled_to_a_time_long_ago_leaves(alias, app, eta):
    """MariaDB has no local time for it."""
    with transaction.atomic(using=alias):
        id = app.task(name="note")(tasks.note).apply_async(("", 1), countdown=86400).id
    assert reschedule(id, eta=eta, using=alias)
    assert StagedJob.objects.using(alias).due().exists()


@pytest.mark.usefixtures("berlin")
def test_a_clock_that_is_turned_is_seen(alias, settings):
    found = [message.id for message in check_databases(databases=[alias])]
    assert found == ["outbox.W049"] * (alias == MARIADB)
    settings.USE_TZ = True
    connections[alias].close()
    assert check_databases(databases=[alias]) == []
