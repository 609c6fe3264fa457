"""Rows may become visible in another order than their ids: the drain skips no lower ids.

"The highest id already drained" would lose a row with a lower id that commits later.
"""

from __future__ import annotations

import threading

import pytest
from django.db import connections, transaction

from outbox_app.jobs.drain.batch import BatchReader, delete
from outbox_app.jobs.drain.drain import Drain
from outbox_app.models import StagedJob
from tests import tasks
from tests.faults.tools import on
from tests.patience import patience

pytestmark = pytest.mark.django_db(transaction=True)

# On SQLite one transaction writes at a time: commit order is id order.
on_servers = on("postgres", "mariadb")


@pytest.fixture
def note(make_app):
    return make_app().task(name="note")(tasks.note)


@pytest.fixture
def open_writer(alias, note):
    """``open_writer(key)``: stages one job in a transaction that stays open until ``commit``."""
    writers = []

    class Writer(threading.Thread):
        def __init__(self, key):
            super().__init__(daemon=True)
            self.key, self.staged, self.told = key, threading.Event(), threading.Event()

        def run(self):
            with transaction.atomic(using=alias):
                note.apply_async((self.key, 0), ordering_key=self.key)
                self.staged.set()
                self.told.wait()
            connections[alias].close()

        def commit(self):
            self.told.set()
            self.join()

    def start(key):
        writers.append(Writer(key))
        writers[-1].start()
        assert writers[-1].staged.wait(patience(10))
        return writers[-1]

    yield start
    for writer in writers:
        writer.commit()


def stage(note, alias, key, count):
    with transaction.atomic(using=alias):
        for i in range(1, count + 1):
            note.apply_async((key, i), ordering_key=key)


@on_servers
def test_a_row_that_commits_late_with_a_low_id_is_drained(alias, note, open_writer):
    late = open_writer("key")  # in one shard with the others, before them
    stage(note, alias, "key", 300)
    drainer = Drain(using=alias, batch_size=50)
    while drainer.run_once():
        pass
    assert drainer.tally.published == 300
    late.commit()
    low = StagedJob.objects.using(alias).get()
    stage(note, alias, "key", 1)
    assert low.id < StagedJob.objects.using(alias).latest("id").id - 300

    # The same drainer, which has seen the higher ids.
    while drainer.run_once():
        pass
    assert drainer.tally.published == 302
    assert not StagedJob.objects.using(alias).exists()
    drainer.holder.leave()


@on_servers
def test_a_long_transaction_delays_its_own_rows_only(alias, note, open_writer):
    late = [open_writer(f"key-{i}") for i in range(3)]
    for i in range(20):
        stage(note, alias, f"key-{i}", 5)
    # Nothing to wait for: not for the open rows, not for their keys, not for their shards.
    assert Drain(using=alias).run(once=True).published == 100
    for writer in late:
        writer.commit()
    assert Drain(using=alias).run(once=True).published == 3


@on("mariadb")
def test_a_batch_is_looked_at_again_for_earlier_jobs_of_a_key(alias, note, open_writer):
    """Its view may show a job and not the one of its key that was committed before it."""
    writer = open_writer("k")
    reader = BatchReader(using=alias, app=note.app.main, batch_size=1000)
    stage(note, alias, "another", 1)
    [row] = reader.read(range(128))  # of an earlier look
    delete([(row.id, row.task_id)], using=alias)
    stage(note, alias, "k", 1)
    looks = []

    def commit_meanwhile(execute, sql, *args):
        result = execute(sql, *args)
        if sql.startswith("(SELECT") and not looks:
            looks.append(1)
            writer.commit()
        return result

    with connections[alias].execute_wrapper(commit_meanwhile):
        rows = reader.read(range(128))
    assert looks
    assert [row.id for row in rows] == sorted(
        StagedJob.objects.using(alias).values_list("id", flat=True)
    )
    assert len(rows) == 2


@on("mariadb")
def test_what_only_the_second_look_shows_waits_for_a_third(alias, note, monkeypatch):
    """It may show a job and not the one of its key that was committed before it, too."""
    stage(note, alias, "k", 1)
    stage(note, alias, "z", 2)
    first, missed, later = (
        StagedJob.objects.using(alias).order_by("id").values_list("id", flat=True)
    )
    look, views = BatchReader._look, [[first], [first, later]]
    monkeypatch.setattr(BatchReader, "_look", lambda *args: views.pop(0) if views else look(*args))
    reader = BatchReader(using=alias, app=note.app.main, batch_size=1000)
    [row] = reader.read(range(128))
    assert row.id == first
    delete([(row.id, row.task_id)], using=alias)
    assert [row.id for row in reader.read(range(128), go_on=True)] == [missed, later]
