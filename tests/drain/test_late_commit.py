"""Rows become visible in another order than that of their ids: no floor under what is read.

"The highest id already drained" would lose a row with a lower id that commits later.
"""

from __future__ import annotations

import threading

import pytest
from django.db import connections, transaction

from outbox_app.delivery.drain import Drain
from outbox_app.models import StagedJob
from tests import tasks

pytestmark = [
    pytest.mark.django_db(transaction=True),
    # On SQLite one transaction writes at a time: commit order is id order.
    pytest.mark.parametrize(
        "alias",
        [pytest.param("postgres", id="postgres"), pytest.param("mariadb", id="mariadb")],
        indirect=True,
    ),
]


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
        assert writers[-1].staged.wait(10)
        return writers[-1]

    yield start
    for writer in writers:
        writer.commit()


def stage(note, alias, key, count):
    with transaction.atomic(using=alias):
        for i in range(1, count + 1):
            note.apply_async((key, i), ordering_key=key)


def test_a_row_that_commits_late_with_a_low_id_is_drained(alias, note, open_writer):
    late = open_writer("key")  # in one shard with the others, before them
    stage(note, alias, "key", 300)
    drainer = Drain(using=alias, batch_size=50)
    while drainer.turn():
        pass
    assert drainer.tally.published == 300
    late.commit()
    low = StagedJob.objects.using(alias).get()
    stage(note, alias, "key", 1)
    assert low.id < StagedJob.objects.using(alias).latest("id").id - 300

    # The same drainer, which has seen the higher ids.
    while drainer.turn():
        pass
    assert drainer.tally.published == 302
    assert not StagedJob.objects.using(alias).exists()
    drainer.membership.leave()


def test_a_long_transaction_delays_its_own_rows_only(alias, note, open_writer):
    late = [open_writer(f"key-{i}") for i in range(3)]
    for i in range(20):
        stage(note, alias, f"key-{i}", 5)
    # Nothing to wait for: not for the open rows, not for their keys, not for their shards.
    assert Drain(using=alias).run(once=True).published == 100
    for writer in late:
        writer.commit()
    assert Drain(using=alias).run(once=True).published == 3
