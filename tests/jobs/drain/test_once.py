"""``--once``: jobs that exist at its start leave, beside live and dead drainers, and writers."""

from __future__ import annotations

import re
from datetime import timedelta

import pytest
from django.db import OperationalError, connections, transaction

from outbox_app.database.clock import DatabaseNow
from outbox_app.jobs.drain.drain import Drain
from outbox_app.jobs.drain.run import _progress, drain_here
from outbox_app.models import Incident, Process, StagedJob
from outbox_app.process import backoff, foreground
from outbox_app.process.foreground import progress
from outbox_app.process.lease import LeaseHolder
from tests import tasks
from tests.patience import patience

pytestmark = pytest.mark.django_db(transaction=True)

LEASE = 1.0
AWAY = "redis://127.0.0.1:1/0"


@pytest.fixture
def note(make_app):
    return make_app().task(name="note")(tasks.note)


@pytest.fixture
def other(alias):
    """A drainer that owns all shards and does nothing."""
    member = LeaseHolder(using=alias, lease_seconds=LEASE)
    member.join()
    return member


@pytest.fixture(autouse=True)
def quick(settings):
    settings.OUTBOX = {**settings.OUTBOX, "PUBLISH_TIMEOUT": 0.4, "INTERVAL": 0.05}


def stage(note, alias, count, **options):
    with transaction.atomic(using=alias):
        for i in range(count):
            note.apply_async(("", i), **options)


@pytest.mark.slow
def test_leaves_to_a_live_drainer_what_is_in_its_shards(alias, note):
    stage(note, alias, 200)
    long_lease = patience(1.5)  # it has to live, on however slow a machine
    other = LeaseHolder(using=alias, lease_seconds=long_lease)
    other.join()
    # It lives, gives up its surplus, and keeps its half.
    other.rebalance()

    def beat(drain):
        other.beat()
        other.rebalance()

    tally = Drain(using=alias, lease_seconds=long_lease, on_turn=beat).run(once=True)

    left = set(StagedJob.objects.using(alias).values_list("shard", flat=True))
    assert left
    assert left <= other.owned
    assert 0 < tally.published < 200
    assert not Incident.objects.using(alias).exists()
    assert Process.objects.using(alias).get().id == other.id


@pytest.mark.slow
def test_takes_over_from_a_dead_one(alias, note, other):
    stage(note, alias, 200)
    tally = Drain(using=alias, lease_seconds=LEASE).run(once=True)
    assert tally.published == 200
    assert not StagedJob.objects.using(alias).exists()
    assert not Process.objects.using(alias).exists()


@pytest.mark.slow
def test_takes_over_held_jobs_that_are_due(alias, note, other):
    stage(note, alias, 20, countdown=4000)
    StagedJob.objects.using(alias).update(available_at=DatabaseNow() - timedelta(seconds=1))
    assert Drain(using=alias, lease_seconds=LEASE).run(once=True).published == 20


def test_ends_although_jobs_keep_coming(alias, note):
    stage(note, alias, 300)

    def stage_more(drain):
        stage(note, alias, 5)

    tally = Drain(using=alias, batch_size=20, on_turn=stage_more).run(once=True)
    assert tally.published == 300
    assert StagedJob.objects.using(alias).count() > 5


def test_a_second_time(alias, note):
    drain = Drain(using=alias)
    stage(note, alias, 3)
    assert drain.run(once=True).published == 3
    stage(note, alias, 3)
    assert drain.run(once=True).published == 6


def test_a_step_that_fails_is_logged_by_its_name(alias, caplog):
    def shown(drain):
        raise OperationalError("away")

    Drain(using=alias, on_turn=shown).run(once=True)
    assert 'step=shown error="OperationalError: away"' in caplog.text


def test_lines_of_progress(alias, note, caplog, monkeypatch):
    """At most one an interval, and none without work."""
    with caplog.at_level("INFO", logger="outbox_app"):
        for interval in (0.0, 10.0):
            monkeypatch.setattr(foreground, "PROGRESS_INTERVAL", interval)
            stage(note, alias, 3)
            Drain(using=alias, on_turn=progress(_progress, parent=None)).run(once=True)
    [line] = caplog.messages
    assert re.fullmatch(
        r"Drainer running rate=[\d,.]+/s published=3 backlog=0 oldest=0.0s dead=0", line
    )


def test_with_nothing_to_do(alias):
    assert Drain(using=alias).run(once=True).done == 0


def test_gives_up_if_the_database_refuses_each_statement(alias, note, monkeypatch, caplog):
    monkeypatch.setattr(backoff, "MAX_BACKOFF", 0.01)
    stage(note, alias, 3)
    with connections[alias].cursor() as cursor:
        cursor.execute("ALTER TABLE outbox_stagedjob RENAME TO outbox_away")
    try:
        assert drain_here(alias, once=True, listen=lambda stop: None) == 1
    finally:
        with connections[alias].cursor() as cursor:
            cursor.execute("ALTER TABLE outbox_away RENAME TO outbox_stagedjob")
    assert "Drainer stopped published=0 dead=0 trouble=" in caplog.text
    assert drain_here(alias, once=True, listen=lambda stop: None) == 0
    assert not StagedJob.objects.using(alias).exists()


@pytest.fixture
def away(make_app):
    """A task of an app whose broker is away."""
    return make_app(AWAY).task(name="note")(tasks.note)


def drain_once(alias):
    return drain_here(alias, once=True, listen=lambda stop: None)


@pytest.mark.slow
def test_gives_up_a_broker_that_is_away(alias, away, note, settings, caplog):
    """From cron it would run beside more and more others. Jobs of another app leave meanwhile."""
    settings.OUTBOX = {**settings.OUTBOX, "LEASE_SECONDS": LEASE}
    stage(away, alias, 2)
    stage(note, alias, 3)

    assert drain_once(alias) == 1

    [last] = [each.getMessage() for each in caplog.records if "stopped" in each.getMessage()]
    assert last.startswith('Drainer stopped published=3 dead=0 trouble="BrokerUnavailable: The br')
    assert "Connection refused" in last
    assert {job.app for job in StagedJob.objects.using(alias)} == {away.app.main}
    assert StagedJob.objects.using(alias).count() == 2
    assert not Incident.objects.using(alias).exists()
    assert not Process.objects.using(alias).exists()


def test_a_broker_without_jobs_may_be_away(alias, away, note):
    stage(away, alias, 1, countdown=4000)
    stage(note, alias, 3)
    drain = Drain(using=alias)
    drain._app_drain(away.app.main).open()

    assert drain.run(once=True).published == 3
    assert drain.trouble
    assert not drain.has_failed


@pytest.mark.slow
def test_a_broker_of_held_jobs_may_be_away(alias, away, note, other):
    """The jobs that wait are in the shards of a live drainer, which sends them."""
    stage(away, alias, 1, countdown=4000)
    stage(note, alias, 3)
    drain = Drain(using=alias, lease_seconds=LEASE, on_turn=lambda _: other.beat())
    drain._app_drain(away.app.main).open()

    drain.run(once=True)
    assert drain.trouble
    assert not drain.has_failed


def test_a_broker_comes_back_in_time(alias, make_app, redis_url, proxy):
    way, url = proxy(redis_url)
    note = make_app(url).task(name="note")(tasks.note)
    stage(note, alias, 3)
    way.mode = "refuse"

    def repair(drain):
        if drain.trouble:
            way.mode = "pass"

    drain = Drain(using=alias, lease_seconds=patience(), on_turn=repair)
    assert drain.run(once=True).published == 3
    assert way.mode == "pass"
    assert not drain.has_failed


def test_a_second_time_after_the_broker_was_away(alias, make_app, redis_url, proxy):
    way, url = proxy(redis_url)
    note = make_app(url).task(name="note")(tasks.note)
    stage(note, alias, 3)
    way.mode = "refuse"
    drain = Drain(using=alias, lease_seconds=LEASE)
    assert drain.run(once=True).published == 0
    assert drain.has_failed

    way.mode = "pass"
    assert drain.run(once=True).published == 3
    assert not drain.has_failed
