"""The clock of one application host is two hours wrong: only the database's clock matters.

A real drainer runs under ``libfaketime``. Times from the *caller's* host (``eta``, ``expires``) are
as wrong as in plain Celery.
"""

from __future__ import annotations

import glob

import pytest

from outbox_app.database.clock import DatabaseNow
from outbox_app.models import Incident, Process, StagedJob

from .tools import QUICK, draining, eventually, on

pytestmark = pytest.mark.django_db(transaction=True)

LIBRARY = "/usr/lib/*/faketime/libfaketime.so.1"


@pytest.fixture(params=["+2h", "-2h"])
def wrong_clock(request):
    """The environment of a process whose clock is wrong."""
    found = glob.glob(LIBRARY)
    if not found:
        pytest.skip("no libfaketime")
    return {
        "LD_PRELOAD": found[0],
        "FAKETIME": request.param,
        "FAKETIME_DONT_FAKE_MONOTONIC": "1",
        "FAKETIME_NO_CACHE": "1",
    }


@on("postgres", "mariadb")
def test_held_jobs_and_expiry(
    alias, wrong_clock, redis_url, make_named_app, start_drainer, book, quick
):
    app, jobs = make_named_app(redis_url), book(alias)
    plain = jobs.stage(app, 2)
    fresh = jobs.stage(app, 2, expires=3600)
    expired = jobs.stage(app, 2, expires=0.001)
    later = jobs.stage(app, 2, countdown=3600)
    due = jobs.stage(app, 2, countdown=3600)
    held = StagedJob.objects.using(alias).held()
    assert held.count() == 4
    held.filter(task_id__in=due).update(available_at=DatabaseNow())

    drainer = start_drainer(alias, app, **wrong_clock)
    rows = StagedJob.objects.using(alias)
    eventually(lambda: rows.count() == 2, "all but the held ones have left")
    assert set(rows.values_list("task_id", flat=True)) == set(later)
    assert drainer.stop() == 0
    sent = set(jobs.receive(app))
    assert sent >= {*plain, *fresh, *due, *expired}
    assert not sent & {*later}
    assert "published=8 dead=0" in drainer.output


@on("postgres")
def test_leases(alias, wrong_clock, redis_url, make_named_app, start_drainer, quick):
    """Neither takes the other for dead."""
    with draining(alias) as right:
        wrong = start_drainer(alias, make_named_app(redis_url), **wrong_clock)
        drainers = Process.objects.using(alias)
        eventually(lambda: drainers.count() == 2, "both run")
        ids = set(drainers.values_list("id", flat=True))
        beats = {id: set() for id in ids}

        def both_have_beaten_for_longer_than_the_lease():
            for id, heartbeat_at in drainers.values_list("id", "heartbeat_at"):
                beats[id].add(heartbeat_at)
            seconds = [(max(b) - min(b)).total_seconds() if b else 0 for b in beats.values()]
            return min(seconds) > QUICK["LEASE_SECONDS"] * 1.5

        eventually(both_have_beaten_for_longer_than_the_lease)
        assert set(drainers.values_list("id", flat=True)) == ids
        assert len(right.holder.owned) == 64
        assert wrong.stop() == 0
    assert not Incident.objects.using(alias).exists()
