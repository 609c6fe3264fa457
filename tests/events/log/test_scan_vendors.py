"""Scans of one database: snapshots, missing positions, and a log that was restored."""

from __future__ import annotations

import random
from dataclasses import replace
from datetime import timedelta

import pytest
from django.db import connections, transaction
from django.db.models import F

from outbox_app.events import NewEvent, publish_many
from outbox_app.events.exceptions import ForeignCursor, TooManyGaps, UnsafeLog
from outbox_app.events.log.state import MysqlState
from outbox_app.events.log.windows.mysql import without
from outbox_app.events.models import Event
from tests.faults.tools import on

from .conformance import commit
from .scans import batch, batches, names, read_all, rows
from .sessions import Session, execute, foreign_transaction
from .test_window_postgres import other_states

pytestmark = pytest.mark.django_db(transaction=True)


@on("postgres")
class TestPostgres:
    """Snapshots."""

    @pytest.mark.parametrize("limit", [2, None])
    def test_a_transaction_that_was_prepared(self, alias, scan, limit):
        name = connections[alias].settings_dict["NAME"]
        with Session(alias) as session:
            session.begin().publish("a", 3)
            session.sql(f"PREPARE TRANSACTION '{name}-scan'")
            session.commit()
        try:
            commit(alias, "c")
            result, state = read_all(scan, scan.beginning(), limit)
            assert result == ["c1"]
        finally:
            execute(alias, f"COMMIT PREPARED '{name}-scan'")
        assert read_all(scan, state, limit)[0] == ["a1", "a2", "a3"]

    def test_a_foreign_transaction_holds_nothing_up(self, alias, scan):
        state = scan.beginning()
        with foreign_transaction():
            commit(alias, "a")
            result, state = read_all(scan, state)
            assert result == ["a1"]
        assert scan.end(state) == state

    def test_a_batch_is_the_same_when_it_is_cut_later(self, alias, scan):
        """The log grows, and the cuts may lie elsewhere; the rows do not."""
        state = scan.beginning()
        commit(alias, *"abcdefgh")
        ends = [scan.end(state, 3), scan.end(state)]
        before = [rows(scan, state, end, 2) for end in ends]
        commit(alias, *"abcdefghijkl")
        assert [rows(scan, state, end, 2) for end in ends] == before

    @pytest.mark.parametrize("limit", [1, None])
    def test_an_id_that_is_given_out_again(self, alias, scan, limit):
        """As by a server that was set back, or a standby that was behind, to before that id."""
        commit(alias, "a")
        with transaction.atomic(using=alias), connections[alias].cursor() as cursor:
            cursor.execute("SELECT pg_current_xact_id()::text::bigint")
            [(lost,)] = cursor.fetchall()
        result, state = read_all(scan, scan.beginning(), limit)
        assert result == ["a1"]
        commit(alias, "b")
        Event.objects.using(alias).filter(stream="b").update(txid=lost)
        assert read_all(scan, state, limit)[0] == ["b1"]

    def test_the_past_or_another_cluster(self, alias, scan):
        commit(alias, "a")
        now = scan.latest()
        for state, says in other_states(now):
            with pytest.raises(ForeignCursor, match=says):
                scan.end(state)
        with pytest.raises(ForeignCursor, match="two database clusters"):
            scan.parts(replace(now, cluster="1"), now, 2)

    def test_a_standby(self, alias, scan):
        run = scan.run

        def standby(sql, params):
            found = run(sql, params)
            if "pg_is_in_recovery" in sql:
                found = [(*row[:2], True, *row[3:]) for row in found]
            return found

        state = scan.beginning()
        scan.run = standby
        for refused in (scan.beginning, scan.latest, lambda: scan.end(state)):
            with pytest.raises(UnsafeLog, match="standby"):
                refused()


@on("mariadb")
class TestMysql:
    """Missing positions."""

    def holes(self, alias, count, *, after=0):
        """Beyond a position, a log in which every second one was never used."""
        with transaction.atomic(using=alias):
            publish_many((NewEvent(f"s{n}-", "made") for n in range(count)), using=alias)
        execute(alias, f"DELETE FROM outbox_event WHERE id > {after} AND id % 2 = 0")

    def aged(self, alias, *, after=0, upto=10**9):
        """As if it was written a minute earlier."""
        rows = Event.objects.using(alias).filter(pk__gt=after, pk__lte=upto)
        rows.update(recorded_at=F("recorded_at") - timedelta(minutes=1))

    @pytest.mark.parametrize("limit", [700, None])
    def test_thousands_of_holes(self, alias, scan, limit):
        self.holes(alias, 5000)
        assert len(set(read_all(scan, scan.beginning(), limit)[0])) == 2500

    def test_what_is_missing_far_back_was_never_used(self, alias, scan, monkeypatch):
        """Rows above it are older than the settle time: there is nothing to wait for."""
        monkeypatch.setattr("outbox_app.events.log.windows.mysql.MAX_RUNS", 10)
        monkeypatch.setattr("outbox_app.events.log.scans.mysql.MAX_RUNS", 10)
        with Session(alias) as slow:
            [late] = slow.begin().publish("slow")
            self.holes(alias, 5000, after=late)
            self.aged(alias, after=late)
            commit(alias, "a")
            result, states = batches(scan, scan.beginning(), 1000)
            assert len(set(result)) == 2501
            assert len(states) == 4
            assert states[1].missing[0][:2] == (late, late + 1)
            slow.commit()
        assert read_all(scan, states[-1])[0] == ["slow1"]

    def test_tombstones_are_waited_for_however_far_back(self, alias, scan):
        scan.settle = float("inf")
        self.holes(alias, 3000)
        self.aged(alias)
        commit(alias, "a")
        assert len(read_all(scan, scan.beginning())[1].missing) == 1500

    def test_what_is_missing_near_the_end_may_come(self, alias, scan):
        self.holes(alias, 3000)
        self.aged(alias, upto=2500)  # a block is as old as its newest row
        state = read_all(scan, scan.beginning())[1]
        assert state.missing[0][0] == 2000

    @pytest.mark.parametrize("seed", range(10))
    def test_what_several_connections_count_is_what_one_counts(
        self, alias, scan, seed, monkeypatch
    ):
        chance = random.Random(seed)
        monkeypatch.setattr("outbox_app.events.log.scans.mysql.BLOCK", chance.choice([2, 5, 10]))
        monkeypatch.setattr("outbox_app.events.log.scans.mysql.COUNTED", 7)
        commit(alias, *("a" for _ in range(60)))
        gone = {id for id in range(1, 60) if chance.random() < chance.choice([0, 0.1, 0.6])}
        Event.objects.using(alias).filter(pk__in=gone).delete()
        self.aged(alias, upto=chance.randrange(60))
        start = MysqlState(chance.choice([0, 3, 10]))
        alone = scan.end(start)
        asked = []

        def run_all(statements):
            asked.extend(statements)
            return [scan.run(sql, []) for sql in statements]

        scan.readers, scan.run_all = 3, run_all
        together = scan.end(start)
        assert len(asked) == 3
        runs = [[run[:2] for run in state.missing] for state in (alone, together)]
        assert runs[0] == runs[1]
        missing = {id for first, last in runs[0] for id in range(first, last + 1)}
        assert missing <= gone
        assert rows(scan, start, together) == rows(scan, start, alone)
        assert {row.id for row in rows(scan, start, alone)} == set(range(start.high + 1, 61)) - gone

    @pytest.mark.parametrize(("settle", "looks"), [(5, 2), (float("inf"), 0)])
    def test_ages_are_looked_up_from_the_top_until_one_has_settled(
        self, alias, scan, settle, looks
    ):
        scan.settle = settle
        self.holes(alias, 5000)
        self.aged(alias)
        commit(alias, "a")
        run, asked = scan.run, []

        def noted(sql, params):
            asked.append("MAX(recorded_at)" in sql)
            assert " OR " not in sql  # blocks that follow one another are one range
            return run(sql, params)

        scan.run = noted
        assert len(scan.end(scan.beginning()).missing) == (1 if looks else 2500)
        assert sum(asked) == looks

    def test_a_gap_is_closed_after_the_settle_time(self, alias, scan):
        scan.settle = 3600
        with Session(alias) as session:
            session.begin().publish("gone", 3)
            session.rollback()
        commit(alias, "a")
        state = scan.end(scan.beginning())
        assert [run[:2] for run in state.missing] == [(1, 3)]
        commit(alias, "b")
        assert [run[:2] for run in scan.end(state).missing] == [(1, 3)]
        scan.settle = 0
        assert scan.end(state).missing == ()

    def test_a_jump(self, alias, scan):
        commit(alias, "a", "b")
        execute(alias, "ALTER TABLE outbox_event AUTO_INCREMENT = 1000000000000")
        commit(alias, "c", "d")
        for limit in (1, 3, None):
            assert read_all(scan, scan.beginning(), limit)[0] == ["a1", "b1", "c1", "d1"]

    def test_tombstones(self, alias, reader, scan):
        scan.tombstones, scan.settle = True, 0
        with Session(alias) as session:
            session.begin().publish("gone", 3)
            session.rollback()
        commit(alias, "a")
        page = reader.read(scan.beginning(), 10).page
        assert reader.read(page.state, 10).page.state.missing == ()
        assert Event.objects.using(alias).filter(type="$tombstone").count() == 3
        state = scan.end(scan.beginning())
        assert (names(batch(scan, scan.beginning(), state)), state.missing) == (["a1"], ())

    @pytest.mark.parametrize("end", ["commit", "rollback"])
    def test_too_many_gaps(self, alias, scan, monkeypatch, end):
        """It stops, and continues by itself."""
        monkeypatch.setattr("outbox_app.events.log.scans.mysql.MAX_RUNS", 3)
        scan.settle = 0
        with Session(alias) as slow:
            slow.begin()
            for _ in range(6):
                slow.publish("slow")
                commit(alias, "a")
            result, state = names(rows(scan, scan.beginning(), scan.end(scan.beginning()))), None
            assert result == [f"a{n}" for n in range(1, 7)]
            state = scan.end(scan.beginning())
            assert len(state.missing) == 6
            commit(alias, "b")
            for _ in range(2):
                with pytest.raises(TooManyGaps, match="6 runs"):
                    scan.end(state)
            getattr(slow, end)()
        found = []
        for _ in range(4):
            after = scan.end(state)
            found += names(batch(scan, state, after))
            state = after
        assert found == [*(f"slow{n}" for n in range(1, 7) if end == "commit"), "b1"]

    def test_a_view_that_is_no_cut(self, alias, scan):
        """MariaDB shows version 2 without version 1, once in a while: here, the first time."""
        commit(alias, *"abab")
        run, hidden = scan.run, {1, 3}

        def view(sql, params):
            found = run(sql, params)
            if "COUNT(*)" in sql:
                return [(block, count - 2, *more) for block, count, *more in found]
            if sql.startswith("SELECT id") and "OFFSET" not in sql and hidden:
                found = [row for row in found if row[0] not in hidden]
                hidden.clear()
            return found

        scan.run = view
        state = scan.end(scan.beginning(), 3)
        assert not hidden
        assert state.missing == ()


@pytest.mark.parametrize("alias", ["default"], ids=["sqlite"], indirect=True)
def test_sqlite_that_was_restored(alias, scan):
    commit(alias, "a", "b")
    state = scan.end(scan.beginning())
    Event.objects.using(alias).all().delete()
    execute(alias, "DELETE FROM sqlite_sequence")
    with pytest.raises(ForeignCursor, match="restored"):
        scan.end(state)


def test_runs_without_holes():
    dice = random.Random(1)

    def some():
        cuts = sorted(dice.sample(range(1, 40), 2 * dice.randrange(1, 6)))
        return [(first, last, None) for first, last in zip(cuts[::2], cuts[1::2], strict=True)]

    def numbers(runs):
        return {n for first, last, _ in runs for n in range(first, last + 1)}

    for _ in range(500):
        runs, holes = some(), some()
        left = without(runs, holes)
        assert numbers(left) == numbers(runs) - numbers(holes)
        assert all(first <= last for first, last, _ in left)
