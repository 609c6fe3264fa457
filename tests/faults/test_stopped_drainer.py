"""A drainer is frozen beyond its lease and goes on (SIGSTOP, SIGCONT, real processes)."""

from __future__ import annotations

import signal

import pytest

from outbox_app.models import Incident, Process, StagedJob
from tests.servers import processes

from .tools import QUICK, assert_handed_back, draining, eventually, on

pytestmark = pytest.mark.django_db(transaction=True)

BATCH = 50


@pytest.mark.parametrize(
    ("alias", "failpoint"),
    [
        ("postgres", "claimed"),
        ("postgres", "checked"),
        ("mariadb", "checked"),
        ("postgres", "published_not_deleted"),
    ],
    indirect=["alias"],
)
def test_frozen_for_twice_the_lease(
    alias, failpoint, redis_url, make_named_app, start_drainer, book, quick
):
    app, jobs = make_named_app(redis_url), book(alias)
    jobs.stage(app, 400)
    frozen = start_drainer(
        *(alias, app, "--batch-size", str(BATCH)), OUTBOX_FAILPOINT=f"{failpoint}=stop@2"
    )
    eventually(lambda: is_frozen(frozen.pid), "it froze")
    before = len(jobs.receive(app))
    assert StagedJob.objects.using(alias).count() > 200

    with draining(alias):
        eventually(lambda: not StagedJob.objects.using(alias).exists(), "the other drained all")
        # All it has from now on is what is in its hand; these rows are of shards it has lost.
        others = set(jobs.receive(app)[before:])
        later = jobs.stage(app, 100)
        eventually(lambda: not StagedJob.objects.using(alias).exists(), "and the new ones")
        processes.continue_tree(frozen.pid)
        frozen.says("other processes removed it")
        eventually(lambda: Process.objects.using(alias).count() == 2, "it is back")
        assert frozen.stop() == 0

    jobs.receive(app)
    jobs.assert_complete()
    if failpoint == "claimed":
        assert not jobs.twice  # it looks at its lease before it sends
    else:
        assert 0 < len(jobs.twice) <= BATCH + 128
        assert set(jobs.twice.values()) == {1}
    assert not set(jobs.twice) & set(later)
    assert set(jobs.twice) <= others
    kinds = Incident.objects.using(alias).values_list("kind", flat=True)
    assert set(kinds) == {Incident.Kind.TAKEOVER}
    assert_handed_back(alias)


@on("postgres")
def test_frozen_without_anybody_to_take_over(alias, redis_url, make_named_app, start_drainer, book):
    """Nobody noticed, so nothing happened: it goes on where it stopped."""
    app, jobs = make_named_app(redis_url), book(alias)
    jobs.stage(app, 400)
    frozen = start_drainer(
        *(alias, app, "--batch-size", str(BATCH)), OUTBOX_FAILPOINT="claimed=stop@2"
    )
    eventually(lambda: is_frozen(frozen.pid), "it froze")
    drainer = Process.objects.using(alias).get()
    silence = QUICK["LEASE_SECONDS"]
    eventually(lambda: age(alias) > silence, "its lease ran out")

    frozen.signal(signal.SIGCONT)
    eventually(lambda: not StagedJob.objects.using(alias).exists(), "it goes on")
    assert Process.objects.using(alias).get().id == drainer.id
    assert frozen.stop() == 0
    jobs.receive(app)
    jobs.assert_exact()


def is_frozen(pid):
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rpartition(")")[2].split()[0] == "T"


def age(alias):
    from outbox_app.jobs.drain.status import drainers

    return max((status.silent_seconds for status in drainers(using=alias)), default=0)
