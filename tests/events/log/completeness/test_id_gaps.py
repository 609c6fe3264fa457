"""MySQL: positions that stay missing are recorded as rows, and closed by evidence in the log."""

from __future__ import annotations

import time

import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from outbox_app.events import publish
from outbox_app.events.log.state import MysqlState
from outbox_app.events.log.windows import mysql
from outbox_app.events.models import Gap
from outbox_app.events.subscriptions import id_gaps
from tests.events.log.sessions import Session

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.parametrize("alias", ["mariadb"], indirect=True),
]


@pytest.fixture
def rows(alias):
    def make():
        gaps = Gap.objects.using(alias).filter(kind=Gap.Kind.ID).order_by("id")
        return list(gaps.values_list("first", "last", "state"))

    return make


def soon(alias, stream="soon"):
    with transaction.atomic(using=alias):
        publish(stream, "made", using=alias)


def polls(reader, *, seconds=30, step=3):
    """Turn for so long by the clock of the process; the database's stands nearly still."""
    for _ in range(seconds // step):
        reader.now += step
        reader.poll()


def test_in_flight_then_filled(alias, reading, rows):
    reader = reading(on_gap="off")
    with Session(alias) as late:
        late.begin().publish("late", 2)
        soon(alias)
        reader.poll()
        polls(reader, seconds=9)
        assert rows() == []  # less than twice the settle time
        polls(reader, seconds=6)
        assert rows() == [(1, 2, "open")]
        polls(reader.start())
        assert rows() == [(1, 2, "open")]  # still the same row
        late.commit()
    polls(reader, seconds=6)
    assert rows() == [(1, 2, "filled")]
    assert set(reader.handled) == {"late:1", "late:2", "soon:1"}
    assert Gap.objects.using(alias).get().settled_at is not None


def test_what_is_left_of_a_gap_is_the_same_row(alias, reading, rows):
    reader = reading(on_gap="off")
    with Session(alias) as one, Session(alias) as two, Session(alias) as three:
        for n, late in enumerate([one, two, three]):
            late.begin().publish(f"late{n}")
        soon(alias)
        reader.poll()
        polls(reader)
        two.commit()
        polls(reader)
        assert rows() == [(1, 3, "open")]
        one.commit()
        three.commit()
    polls(reader, seconds=6)
    assert rows() == [(1, 3, "filled")]


def test_the_gap_of_a_partition_that_is_no_more(alias, reading, rows):
    reader = reading(on_gap="off")
    for part in (1, 7):
        Gap.objects.using(alias).create(
            kind=Gap.Kind.ID,
            subscription="reads",
            partition=part,
            log="outbox_event",
            first=1,
            last=1,
        )
    soon(alias)
    polls(reader, seconds=6)
    assert rows() == [(1, 1, "filled")] * 2


@pytest.mark.parametrize("tombstones", [False, True])
def test_rolled_back_then_closed(alias, reading, rows, tombstones, settings):
    settings.OUTBOX = {**settings.OUTBOX, "TOMBSTONES": tombstones}
    reader = reading(on_gap="off")
    with Session(alias) as late:
        late.begin().publish("late", 3)
        soon(alias)
        reader.poll()
        polls(reader)
        late.rollback()
    assert rows() == [(1, 3, "open")]
    settings.OUTBOX = {**settings.OUTBOX, "SETTLE_SECONDS": 0.0}
    reader.start()
    soon(alias)
    polls(reader, seconds=12)
    assert rows() == [(1, 3, "tombstone" if tombstones else "closed")]
    assert reader.handled == ["soon:1", "soon:2"]


def test_a_look_costs_nothing_where_nothing_is_missing(alias, reading, rows):
    reader = reading(on_gap="off")
    soon(alias)
    reader.poll()
    with CaptureQueriesContext(connections[alias]) as statements:
        polls(reader)
    assert not any(Gap._meta.db_table in each["sql"] for each in statements)


def test_a_look_at_thousands_that_are_missing_takes_no_second(reading):
    """Each partition of a process looks every few seconds."""
    reader = reading(on_gap="off")
    gaps, log = reader.partition._id_gaps, reader.partition._readers[0]
    state = MysqlState(40_000, [(first, first + 1, None) for first in range(1, 40_000, 4)])
    gaps.look(log, state)
    reader.now += id_gaps.LOOK_SECONDS
    began = time.process_time()
    gaps.look(log, state)
    assert time.process_time() - began < 1


def test_at_most_so_many_rows(alias, reading, rows, monkeypatch):
    monkeypatch.setattr(id_gaps, "MAX_ROWS", 2)
    reader = reading(on_gap="off")
    with Session(alias) as late:
        late.begin()
        for n in range(3):
            late.publish(f"late{n}")
            soon(alias)
        reader.poll()
        polls(reader)
        late.rollback()
    assert [(first, state) for first, _, state in rows()] == [(1, "open"), (3, "open")]
    assert mysql.MysqlWindow.needs_dirty


def test_few_settled_rows_stay(alias, reading, rows, monkeypatch):
    """Long transactions are ordinary, and each leaves a row of every partition."""
    monkeypatch.setattr(id_gaps, "MAX_ROWS", 2)
    reader = reading(on_gap="off")
    gaps = Gap.objects.using(alias)
    key = {"kind": Gap.Kind.ID, "subscription": "reads", "log": "outbox_event"}
    for n, state, part in ((1, "closed", 0), (2, "closed", 0), (3, "closed", 0), (4, "open", 0),
                           (1, "closed", 1)):  # fmt: skip
        gaps.create(**key, first=n, last=n, state=state, partition=part)
    soon(alias)
    polls(reader, seconds=6)
    assert rows() == [(3, 3, "closed"), (4, 4, "closed"), (1, 1, "closed")]
