"""Spans: batch after batch, cut into any number of parts, read again at any time: the same rows.

One suite for the three databases; then what is a matter of one of them; then a stress, in which the
usual way to read in batches, ``id > last``, is caught losing rows.
"""

from __future__ import annotations

import json
import random
from dataclasses import replace
from datetime import timedelta

import pytest
from django.db import connections, transaction
from django.db.models import F

from outbox_app import NewEvent, publish_many
from outbox_app.exceptions import DamagedCursor, ForeignCursor, TooManyGaps, UnsafeLog
from outbox_app.log.cursor import MysqlState
from outbox_app.log.reader import LogReader
from outbox_app.log.span import dealt, ranges
from outbox_app.log.spans.mysql import _without
from outbox_app.models import Event
from tests.faults.tools import on

from .conformance import commit, concurrent
from .harness import Row, stress
from .sessions import Session, execute, foreign_transaction, truncate
from .test_window_postgres import other_states

SPANS = {
    "postgresql": "outbox_app.log.spans.postgres.PostgresSpan",
    "mysql": "outbox_app.log.spans.mysql.MysqlSpan",
    "sqlite": "outbox_app.log.spans.sqlite.SqliteSpan",
}
EVERYTHING = "SELECT id, stream, version, data FROM outbox_event WHERE"

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def reader(alias, settings, monkeypatch):
    """A reader whose window is the span. Parts are worth it however small they are."""
    settings.OUTBOX = {**settings.OUTBOX, "WINDOWS": SPANS}
    monkeypatch.setattr("outbox_app.log.span.MIN_POSITIONS", 1)
    truncate(alias)
    reader = LogReader(Event, using=alias)
    yield reader
    reader.close()


@pytest.fixture
def span(reader):
    return reader.window


def rows(span, start, end, count=1):
    """Read a span in so many parts, as other processes would. No row may be in two of them."""
    start, end = (span.state.load(state.dump()) for state in (start, end))
    parts = span.parts(start, end, count)
    assert len(parts) <= count
    assert all(parts)
    found = [
        Row(*row[:-1], json.loads(row[-1]))
        for part in parts
        for condition in part
        for row in span.run(f"{EVERYTHING} ({condition})", [])
    ]
    assert len({row.id for row in found}) == len(found)
    return sorted(found)


def names(found):
    return [f"{row.stream}{row.version}" for row in found]


def batch(span, start, end):
    """Read a span, whatever it is cut into: the same."""
    found = rows(span, start, end)
    for count in (2, 7):
        assert rows(span, start, end, count) == found
    return found


def batches(span, state, limit=None, bound=None):
    """Read until nothing comes. Returns names, and the states before, between and after."""
    states, result = [state], []
    while (end := span.end(states[-1], limit, bound)) != states[-1]:
        found = names(batch(span, states[-1], end))
        assert found
        result += found
        states.append(end)
    return result, states


def read_all(span, state, limit=None, bound=None):
    result, states = batches(span, state, limit, bound)
    return result, states[-1]


class TestSpans:
    """What holds on each database."""

    def test_an_empty_log(self, alias, span):
        for _ in range(2):
            state = span.beginning()
            assert span.end(state) == span.end(state, 5) == state
            assert span.parts(state, state, 4) == []
            assert span.end(state, None, span.latest()) == state
            commit(alias, "a")
            assert read_all(span, state)[0] == ["a1"]
            Event.objects.using(alias).all().delete()
            truncate(alias)
            execute(alias, "DELETE FROM outbox_stream")

    @pytest.mark.parametrize("limit", [1, 2, 3, 7, 100, None])
    def test_batches_of_every_size(self, alias, span, limit):
        start = span.beginning()
        commit(alias, *"abacbad")
        result, states = batches(span, start, limit)
        assert result == ["a1", "b1", "a2", "c1", "b2", "a3", "d1"]
        assert len(states) == 1 + -(-7 // (limit or 7))
        commit(alias, "d")
        assert read_all(span, states[-1], limit)[0] == ["d2"]

    @pytest.mark.parametrize("limit", [1, 2, 100, None])
    def test_between_any_two_states_are_the_batches_between_them(self, alias, span, limit):
        start = span.beginning()
        commit(alias, *"abc")
        result, states = batches(span, start, limit)
        commit(alias, *"abd")
        more, later = batches(span, states[-1], limit)
        states, result = [*states, *later[1:]], result + more
        before = [len(names(rows(span, start, state))) for state in states]
        assert before[-1] == len(result) == 6
        for i, a in enumerate(states):
            for j, b in enumerate(states[i:], i):
                assert names(batch(span, a, b)) == result[before[i] : before[j]]

    @pytest.mark.parametrize("limit", [1, 2, 100])
    def test_everything_from_the_middle_on(self, alias, span, limit):
        """Without a limit all comes that is committed by now, from wherever it is read."""
        commit(alias, *"abcd")
        state = span.end(span.beginning(), limit)
        left = 4 - len(rows(span, span.beginning(), state))
        assert span.end(state) == state or left
        commit(alias, *"efg")
        end = span.end(state)
        assert len(batch(span, state, end)) == left + 3
        assert span.end(end) == end

    def test_a_bound_is_an_end(self, alias, span):
        commit(alias, *"abc")
        bound = span.latest()
        commit(alias, *"de")
        result, state = read_all(span, span.beginning(), 2, bound)
        assert result == ["a1", "b1", "c1"]
        commit(alias, "f")
        assert span.end(state, 2, bound) == span.end(state, None, bound) == state
        assert read_all(span, state, 2)[0] == ["d1", "e1", "f1"]

    def test_nothing_comes_before_it_is_committed_or_when_it_is_not(self, alias, span):
        state = span.beginning()
        with Session(alias) as session:
            session.begin().publish("a")
            session.begin().publish("gone")
            session.rollback()
            session.begin().publish("b")
            session.commit()
            assert span.end(state) == state
            session.commit()
            session.begin().publish("gone", 5)
            session.rollback()
        commit(alias, "c")
        result, state = read_all(span, state, 2)
        assert result == ["a1", "b1", "c1"]
        assert span.end(state) == state

    @concurrent
    @pytest.mark.parametrize("limit", [1, 2, 100, None])
    def test_a_lower_position_that_commits_later(self, alias, span, limit):
        state = span.beginning()
        with Session(alias) as slow, Session(alias) as other:
            slow.begin().publish("slow", 2)
            other.begin().publish("other")
            commit(alias, "a", "b")
            result, states = batches(span, state, limit)
            assert result == ["a1", "b1"]
            other.commit()
            slow.publish("slow")
            commit(alias, "c")
            result, later = batches(span, states[-1], limit)
            assert sorted(result) == ["c1", "other1"]
            slow.commit()
            commit(alias, "slow")
            result, last = batches(span, later[-1], limit)
            assert result == ["slow1", "slow2", "slow3", "slow4"]
        assert span.end(last[-1], limit) == last[-1]
        # Read again after all that, each batch is as it was.
        assert names(batch(span, state, states[-1])) == ["a1", "b1"]
        assert sorted(names(batch(span, later[0], later[-1]))) == ["c1", "other1"]
        assert len(batch(span, state, last[-1])) == 8

    @concurrent
    def test_a_late_commit_between_two_batches(self, alias, span):
        state = span.beginning()
        with Session(alias) as slow:
            slow.begin().publish("slow", 3)
            commit(alias, *"abcd")
            middle = span.end(state, 2)
            assert names(batch(span, state, middle)) == ["a1", "b1"]
            slow.commit()
        commit(alias, "slow")
        assert names(batch(span, state, middle)) == ["a1", "b1"]
        result, end = read_all(span, middle, 2)
        assert sorted(result) == ["c1", "d1", "slow1", "slow2", "slow3", "slow4"]
        versions = [name for name in result if name.startswith("slow")]
        assert versions == sorted(versions)
        assert names(batch(span, middle, end)) == names(rows(span, middle, end))

    @concurrent
    def test_more_late_rows_than_a_batch_holds(self, alias, span):
        """Later versions of their stream must not come before them."""
        state = span.beginning()
        with Session(alias) as slow:
            slow.begin().publish("s", 10)
            commit(alias, "a", "b")
            result, state = read_all(span, state)
            assert result == ["a1", "b1"]
            slow.commit()
        commit(alias, "s", "s")
        result, _ = batches(span, state, 3)
        assert result == [f"s{n}" for n in range(1, 13)]

    @concurrent
    def test_a_late_commit_below_a_bound(self, alias, span):
        with Session(alias) as slow:
            slow.begin().publish("slow", 2)
            commit(alias, "a", "b")
            bound = span.latest()
            result, state = read_all(span, span.beginning(), 1, bound)
            assert result == ["a1", "b1"]
            slow.commit()
        commit(alias, "c")
        result, state = read_all(span, state, 1, bound)
        assert "c1" not in result
        result += read_all(span, state)[0]
        assert sorted(result) == ["c1", "slow1", "slow2"]

    @concurrent
    def test_rows_come_in_the_order_their_writers_saw(self, alias, span):
        state = span.beginning()
        with Session(alias) as first, Session(alias) as second:
            second.begin().assign_xid()
            first.begin().assign_xid()
            first.publish("a")
            first.commit()
            assert second.do(lambda: Event.objects.using(alias).filter(stream="a").exists())
            second.publish("b")
            second.publish("a")
            second.commit()
        assert read_all(span, state, 1)[0] == ["a1", "b1", "a2"]

    def test_a_transaction_that_spans_several_batches(self, alias, span):
        state = span.beginning()
        with Session(alias) as session:
            session.begin()
            events = [NewEvent(f"s{n % 7}-", "made") for n in range(1500)]
            session.do(lambda: len(publish_many(events, using=alias)))
            assert span.end(state) == state
            session.commit()
        result, states = batches(span, state, 400)
        assert len(result) == len(set(result)) == 1500
        assert len(states) == 5
        assert [name for name in result if name.startswith("s3-")][:2] == ["s3-1", "s3-2"]

    def test_parts_are_worth_a_reader(self, alias, span, monkeypatch):
        commit(alias, *"abcdefgh")
        end = span.end(span.beginning())
        assert [len(span.parts(span.beginning(), end, n)) for n in (1, 2, 7)] == [1, 2, 7]
        monkeypatch.setattr("outbox_app.log.span.MIN_POSITIONS", 10**9)
        assert len(span.parts(span.beginning(), end, 7)) == 1


@on("postgres")
class TestPostgres:
    """Snapshots."""

    @pytest.mark.parametrize("limit", [2, None])
    def test_a_transaction_that_was_prepared(self, alias, span, limit):
        name = connections[alias].settings_dict["NAME"]
        with Session(alias) as session:
            session.begin().publish("a", 3)
            session.sql(f"PREPARE TRANSACTION '{name}-span'")
            session.commit()
        try:
            commit(alias, "c")
            result, state = read_all(span, span.beginning(), limit)
            assert result == ["c1"]
        finally:
            execute(alias, f"COMMIT PREPARED '{name}-span'")
        assert read_all(span, state, limit)[0] == ["a1", "a2", "a3"]

    def test_a_foreign_transaction_holds_nothing_up(self, alias, span):
        state = span.beginning()
        with foreign_transaction():
            commit(alias, "a")
            result, state = read_all(span, state)
            assert result == ["a1"]
        assert span.end(state) == state

    def test_a_batch_is_the_same_when_it_is_cut_later(self, alias, span):
        """The log goes on, and the cuts may lie elsewhere; the rows do not."""
        state = span.beginning()
        commit(alias, *"abcdefgh")
        ends = [span.end(state, 3), span.end(state)]
        before = [rows(span, state, end, 2) for end in ends]
        commit(alias, *"abcdefghijkl")
        assert [rows(span, state, end, 2) for end in ends] == before

    def test_the_past_or_another_cluster(self, alias, span):
        commit(alias, "a")
        now = span.latest()
        for state, says in other_states(now):
            with pytest.raises(ForeignCursor, match=says):
                span.end(state)
        with pytest.raises(ForeignCursor, match="two database clusters"):
            span.parts(replace(now, cluster="1"), now, 2)

    def test_a_standby(self, alias, span):
        run = span.run

        def standby(sql, params):
            found = run(sql, params)
            if "pg_is_in_recovery" in sql:
                found = [(row[0], row[1], True, row[3]) for row in found]
            return found

        state = span.beginning()
        span.run = standby
        for refused in (span.beginning, span.latest, lambda: span.end(state)):
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
    def test_thousands_of_holes(self, alias, span, limit):
        self.holes(alias, 5000)
        assert len(set(read_all(span, span.beginning(), limit)[0])) == 2500

    def test_what_is_missing_far_back_was_never_used(self, alias, span, monkeypatch):
        """Rows above it are older than the settle time: there is nothing to wait for."""
        monkeypatch.setattr("outbox_app.log.windows.mysql.MAX_RUNS", 10)
        monkeypatch.setattr("outbox_app.log.spans.mysql.MAX_RUNS", 10)
        with Session(alias) as slow:
            [late] = slow.begin().publish("slow")
            self.holes(alias, 5000, after=late)
            self.aged(alias, after=late)
            commit(alias, "a")
            result, states = batches(span, span.beginning(), 1000)
            assert len(set(result)) == 2501
            assert len(states) == 4
            assert states[1].missing[0][:2] == (late, late + 1)
            slow.commit()
        assert read_all(span, states[-1])[0] == ["slow1"]

    def test_tombstones_are_waited_for_however_far_back(self, alias, span):
        span.settle = float("inf")
        self.holes(alias, 3000)
        self.aged(alias)
        commit(alias, "a")
        assert len(read_all(span, span.beginning())[1].missing) == 1500

    def test_what_is_missing_near_the_end_may_come(self, alias, span):
        self.holes(alias, 3000)
        self.aged(alias, upto=2500)  # a block is as old as its newest row
        state = read_all(span, span.beginning())[1]
        assert state.missing[0][0] == 2000

    def test_a_gap_is_closed_after_the_settle_time(self, alias, span):
        span.settle = 3600
        with Session(alias) as session:
            session.begin().publish("gone", 3)
            session.rollback()
        commit(alias, "a")
        state = span.end(span.beginning())
        assert [run[:2] for run in state.missing] == [(1, 3)]
        commit(alias, "b")
        assert [run[:2] for run in span.end(state).missing] == [(1, 3)]
        span.settle = 0
        assert span.end(state).missing == ()

    def test_a_jump(self, alias, span):
        commit(alias, "a", "b")
        execute(alias, "ALTER TABLE outbox_event AUTO_INCREMENT = 1000000000000")
        commit(alias, "c", "d")
        for limit in (1, 3, None):
            assert read_all(span, span.beginning(), limit)[0] == ["a1", "b1", "c1", "d1"]

    def test_tombstones(self, alias, reader, span):
        span.tombstones, span.settle = True, 0
        with Session(alias) as session:
            session.begin().publish("gone", 3)
            session.rollback()
        commit(alias, "a")
        page = reader.read(span.beginning(), 10).page
        assert reader.read(page.state, 10).page.sealed
        assert Event.objects.using(alias).filter(type="$tombstone").count() == 3
        state = span.end(span.beginning())
        assert (names(batch(span, span.beginning(), state)), state.missing) == (["a1"], ())

    @pytest.mark.parametrize("end", ["commit", "rollback"])
    def test_too_many_gaps(self, alias, span, monkeypatch, end):
        """It stands still, and goes on by itself."""
        monkeypatch.setattr("outbox_app.log.spans.mysql.MAX_RUNS", 3)
        span.settle = 0
        with Session(alias) as slow:
            slow.begin()
            for _ in range(6):
                slow.publish("slow")
                commit(alias, "a")
            result, state = names(rows(span, span.beginning(), span.end(span.beginning()))), None
            assert result == [f"a{n}" for n in range(1, 7)]
            state = span.end(span.beginning())
            assert len(state.missing) == 6
            commit(alias, "b")
            for _ in range(2):
                with pytest.raises(TooManyGaps, match="6 runs"):
                    span.end(state)
            getattr(slow, end)()
        found = []
        for _ in range(4):
            after = span.end(state)
            found += names(batch(span, state, after))
            state = after
        assert found == [*(f"slow{n}" for n in range(1, 7) if end == "commit"), "b1"]

    def test_a_view_that_is_no_cut(self, alias, span):
        """MariaDB shows version 2 without version 1, once in a while: here, the first time."""
        commit(alias, *"abab")
        run, hidden = span.run, {1, 3}

        def view(sql, params):
            found = run(sql, params)
            if "COUNT(*)" in sql:
                return [(block, count - 2, *more) for block, count, *more in found]
            if sql.startswith("SELECT id") and "OFFSET" not in sql and hidden:
                found = [row for row in found if row[0] not in hidden]
                hidden.clear()
            return found

        span.run = view
        state = span.end(span.beginning(), 3)
        assert not hidden
        assert state.missing == ()


@pytest.mark.parametrize("alias", ["default"], ids=["sqlite"], indirect=True)
def test_sqlite_that_was_restored(alias, span):
    commit(alias, "a", "b")
    state = span.end(span.beginning())
    Event.objects.using(alias).all().delete()
    execute(alias, "DELETE FROM sqlite_sequence")
    with pytest.raises(ForeignCursor, match="restored"):
        span.end(state)


def test_a_state_of_another_database(alias, span):
    other = next(text for text in (MysqlState().dump(), '{"window":"sqlite","pos":0}')
                 if span.state.window not in text)  # fmt: skip
    with pytest.raises(DamagedCursor, match="another kind"):
        span.state.load(other)


class SpanReader:
    """Batches of spans under stress: each is read in parts, and read again at the end.

    Args:
        reader: Whose window is a span.
        seed: Of how many parts.
    """

    def __init__(self, reader, *, seed):
        self.span = reader.window
        self.dice = random.Random(seed)
        self.batches = []
        self.close = reader.close

    def start(self):
        return self.span.beginning().dump()

    def read(self, state, limit):
        start = self.span.state.load(state)
        end = self.span.end(start, self.dice.choice([limit, limit, None]))
        found = rows(self.span, start, end, self.dice.choice([1, 2, 7]))
        self.batches.append((start, end, found))
        return found, end.dump(), end != start

    def assert_same_again(self):
        for start, end, found in self.batches:
            assert rows(self.span, start, end, 3) == found
        there = [(a, b, found) for a, b, found in self.batches if a != b]
        for _ in range(20):
            a, b = sorted(self.dice.sample(range(len(there)), 2))
            chain, at = [], there[a][0]
            for start, end, found in there[a : b + 1]:
                if start == at:  # otherwise a batch that was read after a crash, and later again
                    chain, at = chain + found, end
            assert rows(self.span, there[a][0], at, 2) == sorted(chain)


def test_a_span_is_exact(alias, reader):
    spans = SpanReader(reader, seed=11)
    spans.close = lambda: None
    verdict = stress(alias, spans, count=20, seed=11)
    assert verdict.committed > 50
    assert verdict.exact, verdict
    spans.assert_same_again()


class NaiveBatches:
    """Batches up to the highest position there is: what a stream by ``id > last`` reads."""

    def __init__(self, alias):
        self.alias = alias
        self.close = lambda: None

    def start(self):
        return "0"

    def read(self, state, limit):
        sql = f"{EVERYTHING} id > %s ORDER BY id LIMIT {limit}"
        found = [Row(*row[:-1], json.loads(row[-1])) for row in execute(self.alias, sql, state)]
        return found, str(found[-1].id if found else state), bool(found)


@concurrent
def test_naive_batches_are_caught(alias):
    verdict = stress(alias, NaiveBatches(alias), writers=3, count=5, seed=5)
    assert verdict.lost > 0, verdict
    assert not verdict.invented


def test_ranges(monkeypatch):
    monkeypatch.setattr("outbox_app.log.span.MIN_POSITIONS", 10)
    assert ranges(5, 5, 3) == ranges(9, 5, 3) == []
    assert ranges(0, 9, 3) == [(0, 9)]
    assert ranges(0, 30, 2) == [(0, 15), (15, 30)]
    assert ranges(0, 35, 99) == [(0, 11), (11, 23), (23, 35)]


def test_parts_are_dealt_out():
    assert dealt(2, [["a"], ["b"]], [["c"], ["d"]]) == [["a", "c"], ["b", "d"]]
    assert dealt(4, [["a"]], [["c"], ["d"]]) == [["a", "c"], ["d"]]
    assert dealt(4, [], []) == []


def test_intervals_without_holes():
    dice = random.Random(1)

    def some():
        cuts = sorted(dice.sample(range(1, 40), 2 * dice.randrange(1, 6)))
        return list(zip(cuts[::2], cuts[1::2], strict=True))

    def numbers(intervals):
        return {n for first, last in intervals for n in range(first, last + 1)}

    for _ in range(500):
        intervals, holes = some(), some()
        left = _without(intervals, holes)
        assert numbers(left) == numbers(intervals) - numbers(holes)
        assert all(first <= last for first, last in left)
