"""A drainer is killed before, in the middle of and after a batch (SIGKILL, real processes)."""

from __future__ import annotations

import signal

import pytest

from outbox_app.models import Incident, Lease, Process, StagedJob

from .tools import drain, eventually, on

pytestmark = pytest.mark.django_db(transaction=True)

BATCH = 50


@pytest.mark.parametrize(
    ("alias", "failpoint"),
    [
        ("postgres", "claimed"),
        ("postgres", "published_not_deleted"),
        ("postgres", "deleted"),
        ("mariadb", "published_not_deleted"),
        ("default", "published_not_deleted"),
    ],
    indirect=["alias"],
)
def test_killed_at_a_batch(alias, failpoint, redis_url, make_named_app, start_drainer, book, quick):
    app, jobs = make_named_app(redis_url), book(alias)
    jobs.stage(app, 300)
    killed = start_drainer(
        *(alias, app, "--batch-size", str(BATCH)), OUTBOX_FAILPOINT=f"{failpoint}=kill@2"
    )
    assert killed.wait() == -signal.SIGKILL
    left = StagedJob.objects.using(alias).count()
    assert 0 < left < 300
    assert Lease.objects.using(alias).filter(owner=Process.objects.using(alias).get().id).exists()

    drain(alias)

    jobs.receive(app)
    jobs.assert_complete()
    if failpoint == "published_not_deleted":
        # One batch: as many rows as it holds at most (a sweep may take one a shard more).
        assert 0 < len(jobs.twice) <= BATCH + 128
        assert set(jobs.twice.values()) == {1}
    else:
        assert not jobs.twice
    incident = Incident.objects.using(alias).get()
    assert incident.kind == Incident.Kind.TAKEOVER
    assert incident.shards == list(range(128))


@on("postgres")
def test_its_shards_are_taken_over_by_one_that_runs(
    alias, redis_url, make_named_app, start_drainer, book
):
    """Both run; one is killed at a moment of its own; the other ends with all shards."""
    app, jobs = make_named_app(redis_url), book(alias)
    drainers = [start_drainer(alias, app) for _ in range(2)]
    owners = Lease.objects.using(alias).values_list("owner", flat=True)
    eventually(lambda: len({*owners.all()} - {None}) == 2, "both own shards")
    jobs.stage(app, 500)
    drainers[0].kill()
    jobs.stage(app, 500)

    eventually(lambda: not StagedJob.objects.using(alias).exists(), "all drained")
    assert drainers[1].stop() == 0
    jobs.receive(app)
    jobs.assert_complete()


@on("postgres")
def test_killed_between_two_confirms(
    alias, rabbitmq_url, proxy, make_named_app, start_drainer, book, quick
):
    """Jobs of one key go one by one, so the kill comes in the middle of what was read at once."""
    slow, url = proxy(rabbitmq_url)
    slow.mode, slow.delay = "delay", 0.01
    app, jobs = make_named_app(url), book(alias)
    jobs.stage(app, 200, key="one after the other")
    killed = start_drainer(alias, app)
    eventually(lambda: jobs.receive(app, url=rabbitmq_url), "one was confirmed")
    killed.kill()
    left = StagedJob.objects.using(alias).count()
    sent = set(jobs.receive(app, url=rabbitmq_url))
    # A batch is deleted as a whole; a busy machine may have cut one off, by the drainer's lease.
    assert len(sent) > 200 - left

    slow.mode = "pass"
    drain(alias)

    jobs.receive(app)
    jobs.assert_complete()
    assert set(jobs.twice) <= sent
