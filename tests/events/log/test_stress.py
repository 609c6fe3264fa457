"""Delivered rows equal committed rows, in order, with any kind of writers; naive readers fail.

A harness that cannot detect a loss proves nothing: it also runs the usual cursors, and each of them
must lose rows or break the order of a stream.
"""

from __future__ import annotations

import json
import time

import pytest
from django.db import connections

from outbox_app.events.models import Event
from tests.faults.tools import on

from .harness import Row, WindowReader, stress
from .sessions import execute, foreign_transaction

pytestmark = pytest.mark.django_db(transaction=True)

SELECT = "SELECT id, stream, version, data FROM outbox_event"


class NaiveReader:
    """A cursor in one statement: ``where`` says which rows come next, given the cursor.

    It is made of the columns ``key`` of the last row, which are the order as well.
    """

    def __init__(self, alias: str, where: str, key: str = "id") -> None:
        self.alias = alias
        self.where = where
        self.key = key

    def start(self):
        last = f"SELECT {self.key} FROM outbox_event ORDER BY {self.key} DESC LIMIT 1"
        rows = execute(self.alias, last)
        return json.dumps([str(each) for each in rows[0]] if rows else self.beginning())

    def beginning(self):
        return ["2000-01-01" if each == "recorded_at" else "0" for each in self.key.split(", ")]

    def read(self, state, limit):
        cursor = json.loads(state)
        sql = (
            f"SELECT {self.key}, id, stream, version, data FROM outbox_event "
            f"WHERE {self.where} ORDER BY {self.key} LIMIT {limit}"
        )
        rows = execute(self.alias, sql, *cursor)
        if not rows:
            return [], state, False
        width = len(cursor)
        state = json.dumps([str(each) for each in rows[-1][:width]])
        return [Row(*row[width:-1], json.loads(row[-1])) for row in rows], state, True

    def close(self):
        pass


class ImpatientReader:
    """``id > cursor``, and what is missing is waited for, but for 100 ms only."""

    def __init__(self, alias: str) -> None:
        self.alias = alias

    def start(self):
        high = Event.objects.using(self.alias).order_by("-id").values_list("id", flat=True)
        return json.dumps([high.first() or 0, {}])

    def read(self, state, limit):
        high, missing = json.loads(state)
        now = time.monotonic()
        wanted = [int(id) for id, since in missing.items() if now - since <= 0.1] or [0]
        slots = ", ".join(["%s"] * len(wanted))
        sql = f"({SELECT} WHERE id > %s ORDER BY id LIMIT {limit}) UNION ALL "
        rows = execute(self.alias, f"{sql} ({SELECT} WHERE id IN ({slots}))", high, *wanted)
        rows = [Row(*row[:-1], json.loads(row[-1])) for row in sorted(rows)]
        there = {row.id for row in rows}
        kept = {str(id): missing[str(id)] for id in set(wanted) - there - {0}}
        top = max([high, *there])
        kept.update({str(id): now for id in set(range(high + 1, top)) - there})
        return rows, json.dumps([top, kept]), bool(rows)

    def close(self):
        pass


def by_id(alias):
    return NaiveReader(alias, "id > %s")


def by_id_below_xmin(alias):
    horizon = "txid < pg_snapshot_xmin(pg_current_snapshot())::text::bigint"
    return NaiveReader(alias, f"id > %s AND {horizon}")


def by_transaction(alias):
    horizon = "txid < pg_snapshot_xmin(pg_current_snapshot())::text::bigint"
    return NaiveReader(alias, f"(txid, id) > (%s, %s) AND {horizon}", "txid, id")


def by_time(alias):
    now = "UTC_TIMESTAMP(6)" if connections[alias].vendor == "mysql" else "now()"
    settled = f"recorded_at < {now} - INTERVAL '1' SECOND"
    return NaiveReader(alias, f"(recorded_at, id) > (%s, %s) AND {settled}", "recorded_at, id")


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_a_window_is_exact(alias, seed):
    verdict = stress(alias, WindowReader(alias), seed=seed)
    assert verdict.committed > 100
    assert verdict.exact, verdict


@on("postgres")
def test_a_foreign_transaction_holds_nothing_up(alias):
    with foreign_transaction():
        verdict = stress(alias, WindowReader(alias), count=10, seed=3)
    assert verdict.committed > 20
    assert verdict.exact, verdict


@on("mariadb")
def test_many_writers_of_one_stream(alias, monkeypatch):
    """Where a read view that is no cut shows a version without the one before it."""
    monkeypatch.setattr("tests.events.log.harness.Writer.shared", lambda self: "hot")
    verdict = stress(alias, WindowReader(alias), writers=8, count=25, seed=4)
    assert verdict.exact, verdict


NAIVE = [
    ("postgres", by_id),
    ("postgres", by_id_below_xmin),
    ("postgres", by_transaction),
    ("postgres", by_time),
    ("mariadb", by_id),
    ("mariadb", ImpatientReader),
    ("mariadb", by_time),
]


@pytest.mark.parametrize(("alias", "make"), NAIVE, indirect=["alias"])
def test_a_naive_reader_is_caught(alias, make):
    verdict = stress(alias, make(alias), writers=3, count=5, seed=5)
    assert verdict.caught, verdict
    assert not verdict.invented
