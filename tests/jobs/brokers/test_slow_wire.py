"""A slow network: large messages get enough time, and cost neither the lease nor another job."""

from __future__ import annotations

import pytest

from outbox_app.models import DeadJob, Process, StagedJob
from tests.faults.tools import draining, eventually, on

pytestmark = [
    pytest.mark.django_db(transaction=True),
    on("default"),
    pytest.mark.usefixtures("quick"),
]

LARGE = 3_000_000


def stage_large(app, jobs, count=1, size=LARGE):
    """Stage jobs whose arguments have so many bytes. Returns their task ids."""
    return jobs.stage(app, count, link_error=app.signature("note", args=("x" * size, 0)))


def left(alias):
    return StagedJob.objects.using(alias).count()


@pytest.fixture
def way(private_redis, proxy):
    """A proxy in front of Redis, and the proxy's address."""
    return proxy(private_redis.url)


def test_time_allowed_grows_with_the_size(alias, way, quick, make_named_app, book, drained):
    """4 MB over 1.5 MB/s take longer than the timeout of one second, and less than the lease."""
    quick(LEASE_SECONDS=10)
    slow, url = way
    app, jobs = make_named_app(url), book(alias)
    stage_large(app, jobs)
    jobs.stage(app, 20)
    slow.bytes_per_second = 1_500_000
    with draining(alias):
        drained(alias)

    slow.bytes_per_second = 0
    jobs.receive(app)
    jobs.assert_exact()


def test_lease_is_renewed_within_a_batch(alias, way, make_named_app, book, drained):
    """A batch takes three leases; a second drainer takes none of its shards."""
    slow, url = way
    app, jobs = make_named_app(url), book(alias)
    stage_large(app, jobs, 120, size=30_000)
    slow.bytes_per_second = 1_000_000
    with draining(alias) as one, draining(alias) as two:
        eventually(lambda: Process.objects.using(alias).count() == 2, "both run")
        drained(alias)
        assert one.tally.published + two.tally.published == 120

    slow.bytes_per_second = 0
    jobs.receive(app)
    jobs.assert_exact()


def test_message_that_never_gets_through(alias, way, make_named_app, book, buried, drained):
    """It is dead after three attempts, alone; those behind it left before."""
    slow, url = way
    app, jobs = make_named_app(url), book(alias)
    [large] = stage_large(app, jobs)
    jobs.stage(app, 100)
    slow.bytes_per_second = 400_000
    with draining(alias):
        eventually(lambda: left(alias) <= 1, "the small ones leave")
        drained(alias)

    slow.bytes_per_second = 0
    assert "in 3 attempts, and took others in between" in buried(alias)[large]
    assert len(buried(alias)) == 1
    jobs.receive(app)
    assert set(jobs.jobs) - set(jobs.sent) <= {large}
    assert set(jobs.twice) <= {large}


def test_broker_that_takes_nothing_costs_no_job(alias, way, make_named_app, book, drained):
    slow, url = way
    app, jobs = make_named_app(url), book(alias)
    stage_large(app, jobs)
    jobs.stage(app, 1)
    slow.mode = "blackhole"
    with draining(alias) as drainer:
        eventually(lambda: drainer.trouble, "it notices")
        trouble = drainer._apps[app.main].backoff
        eventually(lambda: trouble.failures > 4, "it tries again")
        assert left(alias) == 2
        slow.mode = "pass"
        drained(alias)

    jobs.receive(app)
    jobs.assert_complete()
    assert not DeadJob.objects.using(alias).exists()
