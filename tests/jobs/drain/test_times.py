"""Jobs with a time: held ones wait until they are due, expired ones are sent to be revoked."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

import pytest
from django.db import transaction
from django.utils import timezone

from outbox_app.database.clock import DatabaseNow
from outbox_app.jobs.drain.drain import Drain
from outbox_app.models import StagedJob
from tests import tasks

from .test_main_path import received

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def note(make_app):
    return make_app().task(name="note")(tasks.note)


def test_a_job_due_beyond_the_horizon_is_held_until_it_is_due(alias, note):
    with transaction.atomic(using=alias):
        note.apply_async(("", 1), countdown=3600)
        note.apply_async(("", 2), countdown=10)
        note.apply_async(("", 3))

    assert Drain(using=alias).run(once=True).published == 2
    held = StagedJob.objects.using(alias).get()
    assert held.available_at - timezone.now() > timedelta(minutes=50)

    StagedJob.objects.using(alias).update(available_at=DatabaseNow())
    assert Drain(using=alias).run(once=True).published == 1
    assert len(received(note.app)) == 3


def test_held_jobs_go_by_the_clock_of_the_database(alias, note, monkeypatch):
    with transaction.atomic(using=alias):
        note.apply_async(("", 1), countdown=3600)
    two_hours_on = timezone.now() + timedelta(hours=2)
    monkeypatch.setattr(timezone, "now", lambda: two_hours_on)

    assert Drain(using=alias).run(once=True).published == 0


def test_an_expired_job_is_published_without_a_time_to_live(alias, note):
    with transaction.atomic(using=alias):
        late = note.apply_async(("", 1), expires=timezone.now() - timedelta(seconds=5))
        note.apply_async(("", 2), expires=600)

    tally = Drain(using=alias).run(once=True)

    assert (tally.published, tally.dead) == (2, 0)
    expired, message = sorted(received(note.app), key=lambda m: m.headers["id"] != late.id)
    assert "expiration" not in expired.properties
    assert expired.headers["expires"] < timezone.now().isoformat()
    assert 590_000 < int(message.properties["expiration"]) <= 600_000
    assert not StagedJob.objects.using(alias).exists()


def test_a_job_that_expires_in_years_is_published_without_a_time_to_live(alias, note):
    """RabbitMQ refuses one of more than ten years, and closes the channel."""
    with transaction.atomic(using=alias):
        note.apply_async(("", 1), expires=datetime(9999, 12, 31, tzinfo=UTC))
        note.apply_async(("", 2), expires=300 * 86400)

    assert Drain(using=alias).run(once=True).published == 2
    never, late = sorted(received(note.app), key=lambda m: m.headers["expires"], reverse=True)
    assert "expiration" not in never.properties
    assert never.headers["expires"].startswith("9999-12-31")
    assert int(late.properties["expiration"]) > 299 * 86_400_000


@pytest.mark.parametrize("zone", ["Asia/Kolkata", "America/Chicago"])
def test_expiry_without_time_zones(alias, note, settings, zone):
    """On SQLite the database's clock is UTC all the same, and on MySQL in its session's zone."""
    settings.USE_TZ, settings.TIME_ZONE = False, zone
    with transaction.atomic(using=alias):
        note.apply_async(("", 1), expires=24 * 3600)

    Drain(using=alias).run(once=True)
    [message] = received(note.app)
    assert 23.9 * 3_600_000 < int(message.properties["expiration"]) <= 24 * 3_600_000


def test_expiry_goes_by_the_clock_of_the_database(alias, note, monkeypatch):
    with transaction.atomic(using=alias):
        note.apply_async(("", 1), expires=600)
    two_hours_on = timezone.now() + timedelta(hours=2)
    monkeypatch.setattr(timezone, "now", lambda: two_hours_on)

    Drain(using=alias).run(once=True)
    [message] = received(note.app)
    assert 590_000 < int(message.properties["expiration"]) <= 600_000
