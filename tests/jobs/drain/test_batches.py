"""The contents of a batch: messages of every size, in bounded memory."""

from __future__ import annotations

import json

import pytest
from django.db import connections, transaction

from outbox_app.jobs.drain import batch
from outbox_app.jobs.drain.app_drain import AppDrain
from outbox_app.jobs.drain.drain import Drain
from outbox_app.jobs.drain.outcome import PublishResult
from outbox_app.models import Lease, Process, StagedJob
from outbox_app.process import backoff
from tests import tasks

from .test_main_path import received

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("go_on", [False, True])
def test_large_messages_are_read_one_by_one_and_a_batch_ends_at_its_budget(
    alias, make_app, monkeypatch, go_on
):
    monkeypatch.setattr(batch, "BUDGET_BYTES", 1_000_000)
    monkeypatch.setattr(batch, "SERVES", 1e9)
    app = make_app()
    note = app.task(name="note")(tasks.note)
    with transaction.atomic(using=alias):
        for i in range(60):
            large = i % 6 == 5
            note.apply_async(("x" * 400_000 if large else "", i), ordering_key=str(i % 3))
    reader = batch.BatchReader(using=alias, app=app.main, batch_size=20)
    shards = range(128)

    sizes = []
    seen: list[int] = []
    while rows := reader.read(shards, go_on=go_on):
        sizes.append(sum(len(row.body) for row in rows))
        seen += [json.loads(row.body)[0][1] for row in rows]
        batch.delete([(row.id, row.task_id) for row in rows], using=alias)

    assert seen == list(range(60))
    assert max(sizes) < 1_500_000
    assert len(sizes) < 20


def test_large_and_small_messages_arrive_whole(alias, make_app):
    app = make_app()
    note = app.task(name="note")(tasks.note)
    words = ["x" * size for size in (10, batch.SMALL_BYTES, 3 * batch.SMALL_BYTES, 0)]
    with transaction.atomic(using=alias):
        for i, word in enumerate(words):
            note.apply_async((word, i), ordering_key="one")

    Drain(using=alias).run(once=True)

    assert [json.loads(m.body)[0][0] for m in received(app)] == words


def test_a_large_job_that_is_gone_before_its_message_is_read(alias, make_app, monkeypatch):
    app = make_app()
    note = app.task(name="note")(tasks.note)
    with transaction.atomic(using=alias):
        gone = note.delay("x" * 2 * batch.SMALL_BYTES, 0).id
        kept = note.delay("", 1).id
    reader = batch.BatchReader(using=alias, app=app.main, batch_size=20)
    fetch = reader._fetch

    def cancelled(ids):
        rows = fetch(ids)
        StagedJob.objects.using(alias).filter(task_id=gone).delete()
        return rows

    monkeypatch.setattr(reader, "_fetch", cancelled)
    assert [row.task_id for row in reader.read(range(128))] == [kept]


def test_jobs_are_deleted_whatever_their_task_id_is_made_of(alias, make_app):
    app = make_app("memory://")
    note = app.task(name="note")(tasks.note)
    ids = ['"', "\\", '\\"', "a,b", "{}", "'", "%s", "line\nnext", " ", "NULL", "ü"]
    with transaction.atomic(using=alias):
        for task_id in ids:
            note.apply_async(("", 0), task_id=task_id)

    Drain(using=alias).run(once=True)

    assert sorted(message.headers["id"] for message in received(app)) == sorted(ids)
    assert not StagedJob.objects.using(alias).exists()


def test_the_lease_is_renewed_within_a_batch(alias, make_app):
    note = make_app().task(name="note")(tasks.note)
    now, drain = [0.0], Drain(using=alias)
    drain.holder.clock = lambda: now[0]
    drain.run_once()
    with transaction.atomic(using=alias):
        for i in range(10):
            note.delay("", i)
    may_send = drain._may_send

    def slow_send(seconds: float = 0.0) -> float:
        now[0] += drain.holder.lease_seconds / 3
        return may_send(seconds)

    drain._may_send = slow_send
    while not drain.tally.published:
        assert drain.run_once()
    assert drain.tally.published == 10
    drain.holder.leave()


def test_a_drainer_that_is_always_busy_shares_its_shards_all_the_same(alias, make_app):
    """Its heartbeats come within batches; that must not keep it from looking at the others."""
    app = make_app()
    note = app.task(name="note")(tasks.note)
    with transaction.atomic(using=alias):
        for i in range(40):
            note.delay("", i)
    now = [0.0]
    busy, other = Drain(using=alias, batch_size=1), Drain(using=alias)
    busy.holder.clock = lambda: now[0]
    busy.run_once()
    publisher_send = busy._may_send

    def slow_send(seconds: float = 0.0) -> float:
        now[0] += busy.holder.lease_seconds / 3
        return publisher_send(seconds)

    busy._may_send = slow_send
    other.holder.join()
    assert not other.holder.owned
    assert Process.objects.using(alias).count() == 2

    for _ in range(3):
        busy.run_once()
    other.holder.rebalance()

    assert len(other.holder.owned) == 64
    assert Lease.objects.using(alias).filter(owner=busy.holder.id).count() == 64
    busy.holder.leave()
    other.holder.leave()
    StagedJob.objects.using(alias).all().delete()


def test_the_later_jobs_of_a_key_wait_for_one_that_stayed(alias, make_app, monkeypatch):
    """A slow database: the ids of the look serve for longer than the pause after the failure."""
    monkeypatch.setattr(batch, "SERVES", 10**9)
    monkeypatch.setattr(backoff, "MAX_BACKOFF", 0.0)
    app = make_app()
    note = app.task(name="note")(tasks.note)
    with transaction.atomic(using=alias):
        for word in ("first", "second", "third"):
            note.apply_async((word, 0), ordering_key="key")
    publish, failures = AppDrain.publish, [ConnectionError("away for a moment")]

    def fail_once(self, rows, **options):
        if failures:
            return PublishResult(error=failures.pop())
        return publish(self, rows, **options)

    monkeypatch.setattr(AppDrain, "publish", fail_once)
    Drain(using=alias, batch_size=1).run(once=True)
    assert not failures
    words = [message.payload[0][0] for message in received(app)]
    assert words == ["first", "second", "third"]


@pytest.mark.parametrize("alias", ["default"], indirect=True)
def test_a_time_that_was_edited_into_nonsense_costs_no_span(alias, make_app):
    note = make_app().task(name="note")(tasks.note)
    with transaction.atomic(using=alias):
        note.delay("", 1)
    with connections[alias].cursor() as cursor:
        cursor.execute("UPDATE outbox_stagedjob SET staged_at = 'nonsense'")
    [row] = batch.BatchReader(using=alias, app=note.app.main, batch_size=1).read(range(128))
    assert round(row.waited, 6) == 0  # as a span of the publish has it
