"""Many drainers at once: each job once, even shares, and the order of each key (P7)."""

from __future__ import annotations

import signal
import threading
from collections import Counter

import pytest
from django.db import connections, transaction

from outbox_app.models import Lease, Process, StagedJob
from tests.patience import patience

from .tools import DrainThread, assert_handed_back, draining, eventually, on

pytestmark = pytest.mark.django_db(transaction=True)

SHARDS = 128


def shares(alias):
    """How many shards each live drainer owns."""
    live = set(Process.objects.using(alias).values_list("id", flat=True))
    owners = Lease.objects.using(alias).values_list("owner", flat=True)
    return sorted(Counter(owner for owner in owners if owner in live).values())


def even(count):
    share, more = divmod(SHARDS, count)
    return [share] * (count - more) + [share + 1] * more


@pytest.mark.parametrize("count", [1, 1000])
@on("postgres", "mariadb", "default")
def test_all_start_at_once(alias, count, redis_url, make_named_app, book, quick):
    app, jobs = make_named_app(redis_url), book(alias)
    jobs.stage(app, count)
    drainers = [DrainThread(alias, batch_size=100) for _ in range(6)]
    for drainer in drainers:
        drainer.start()
    try:
        eventually(lambda: not StagedJob.objects.using(alias).exists(), "drained")
        eventually(lambda: shares(alias) == even(6), "even shares")
    finally:
        for drainer in drainers:
            drainer.drain.stop()
        for drainer in drainers:
            drainer.join(patience())
    assert [drainer.error for drainer in drainers] == [None] * 6
    assert sum(drainer.drain.tally.published for drainer in drainers) == count
    jobs.receive(app)
    jobs.assert_exact()
    assert_handed_back(alias)


@on("postgres", "mariadb")
def test_shares_become_even_when_one_comes_or_goes(alias, quick):
    with draining(alias):
        eventually(lambda: shares(alias) == even(1))
        with draining(alias):
            eventually(lambda: shares(alias) == even(2))
            with draining(alias):
                eventually(lambda: shares(alias) == even(3))
            eventually(lambda: shares(alias) == even(2))
        eventually(lambda: shares(alias) == even(1))


@on("postgres", "mariadb")
def test_more_drainers_than_shards(alias, quick):
    """Whoever owns nothing waits; nothing breaks."""
    from outbox_app.process.lease import LeaseHolder

    members = [LeaseHolder(using=alias, lease_seconds=60, parts=3) for _ in range(5)]
    for member in members:
        member.join()
    for _ in range(3):
        for member in members:
            member.rebalance()
    assert sorted(len(member.owned) for member in members) == [0, 0, 1, 1, 1]
    assert set().union(*(member.owned for member in members)) == {0, 1, 2}
    for member in members:
        member.leave()
    assert_handed_back(alias)


@pytest.mark.parametrize("broker", ["redis", "rabbitmq"])
@on("postgres", "mariadb")
def test_each_key_keeps_its_order(
    alias, broker, request, make_named_app, start_drainer, book, quick
):
    """Writers that lock their key, drainers that come, go, and die (P7)."""
    app = make_named_app(request.getfixturevalue(f"{broker}_url"))
    jobs, note = book(alias), app.tasks["note"]
    locks = {f"key-{i}": threading.Lock() for i in range(20)}
    errors = []

    def write(writer):
        try:
            for i in range(60):
                key = f"key-{(writer * 7 + i) % len(locks)}"
                # The lock stands for that of the aggregate's row: held until after the commit.
                with locks[key], transaction.atomic(using=alias):
                    count[key] += 1
                    note.apply_async((key, count[key]), ordering_key=key)
        except BaseException as error:
            errors.append(error)
        finally:
            connections[alias].close()

    count = Counter()
    writers = [threading.Thread(target=write, args=(i,)) for i in range(4)]
    victim = start_drainer(alias, app, OUTBOX_FAILPOINT="published_not_deleted=kill")
    eventually(Process.objects.using(alias).exists, "the one that will die runs")
    with draining(alias, batch_size=20):
        for writer in writers:
            writer.start()
        with draining(alias, batch_size=20):
            eventually(lambda: sum(count.values()) > 80 or errors)
        with draining(alias, batch_size=20):
            for writer in writers:
                writer.join(patience())
        eventually(lambda: not StagedJob.objects.using(alias).exists(), "drained")

    assert victim.wait() == -signal.SIGKILL
    assert not errors
    jobs.receive(app)
    assert sum(count.values()) == 240
    assert len(set(jobs.sent)) == 240
    first = dict(reversed([(task_id, i) for i, task_id in enumerate(jobs.sent)]))
    for key, total in count.items():
        mine = sorted(
            (at, jobs.bodies[at][1]) for at in first.values() if jobs.bodies[at][0] == key
        )
        assert [number for _, number in mine] == list(range(1, total + 1))
