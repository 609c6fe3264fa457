"""Scans return the same rows batch by batch, in any number of parts, and when they are repeated.

One suite for the three databases, and a stress test, in which the usual way to read in batches,
``id > last``, is shown to lose rows. Tests of one database are in ``test_scan_vendors``.
"""

from __future__ import annotations

import random

import pytest

from outbox_app.events import NewEvent, publish_many
from outbox_app.events.exceptions import DamagedCursor
from outbox_app.events.log.scan import dealt, ranges
from outbox_app.events.log.state import MysqlState
from outbox_app.events.models import Event

from .conformance import commit, concurrent
from .harness import stress
from .scans import batch, batches, names, read_all, rows
from .sessions import Session, execute, truncate
from .test_stress import by_id

pytestmark = pytest.mark.django_db(transaction=True)


class TestScans:
    """What holds on each database."""

    def test_an_empty_log(self, alias, scan):
        for _ in range(2):
            state = scan.beginning()
            assert scan.end(state) == scan.end(state, 5) == state
            assert scan.parts(state, state, 4) == []
            assert scan.end(state, None, scan.latest()) == state
            commit(alias, "a")
            assert read_all(scan, state)[0] == ["a1"]
            Event.objects.using(alias).all().delete()
            truncate(alias)
            execute(alias, "DELETE FROM outbox_stream")

    @pytest.mark.parametrize("limit", [1, 2, 3, 7, 100, None])
    def test_batches_of_every_size(self, alias, scan, limit):
        start = scan.beginning()
        commit(alias, *"abacbad")
        result, states = batches(scan, start, limit)
        assert result == ["a1", "b1", "a2", "c1", "b2", "a3", "d1"]
        assert len(states) == 1 + -(-7 // (limit or 7))
        commit(alias, "d")
        assert read_all(scan, states[-1], limit)[0] == ["d2"]

    @pytest.mark.parametrize("limit", [1, 2, 100, None])
    def test_between_any_two_states_are_the_batches_between_them(self, alias, scan, limit):
        start = scan.beginning()
        commit(alias, *"abc")
        result, states = batches(scan, start, limit)
        commit(alias, *"abd")
        more, later = batches(scan, states[-1], limit)
        states, result = [*states, *later[1:]], result + more
        before = [len(names(rows(scan, start, state))) for state in states]
        assert before[-1] == len(result) == 6
        for i, a in enumerate(states):
            for j, b in enumerate(states[i:], i):
                assert names(batch(scan, a, b)) == result[before[i] : before[j]]

    @pytest.mark.parametrize("limit", [1, 2, 100])
    def test_everything_from_the_middle_on(self, alias, scan, limit):
        """Without a limit all comes that is committed by now, from wherever it is read."""
        commit(alias, *"abcd")
        state = scan.end(scan.beginning(), limit)
        left = 4 - len(rows(scan, scan.beginning(), state))
        assert scan.end(state) == state or left
        commit(alias, *"efg")
        end = scan.end(state)
        assert len(batch(scan, state, end)) == left + 3
        assert scan.end(end) == end

    def test_a_bound_is_an_end(self, alias, scan):
        commit(alias, *"abc")
        bound = scan.latest()
        commit(alias, *"de")
        result, state = read_all(scan, scan.beginning(), 2, bound)
        assert result == ["a1", "b1", "c1"]
        commit(alias, "f")
        assert scan.end(state, 2, bound) == scan.end(state, None, bound) == state
        assert read_all(scan, state, 2)[0] == ["d1", "e1", "f1"]

    def test_nothing_comes_before_it_is_committed_or_when_it_is_not(self, alias, scan):
        state = scan.beginning()
        with Session(alias) as session:
            session.begin().publish("a")
            session.begin().publish("gone")
            session.rollback()
            session.begin().publish("b")
            session.commit()
            assert scan.end(state) == state
            session.commit()
            session.begin().publish("gone", 5)
            session.rollback()
        commit(alias, "c")
        result, state = read_all(scan, state, 2)
        assert result == ["a1", "b1", "c1"]
        assert scan.end(state) == state

    @concurrent
    @pytest.mark.parametrize("limit", [1, 2, 100, None])
    def test_a_lower_position_that_commits_later(self, alias, scan, limit):
        state = scan.beginning()
        with Session(alias) as slow, Session(alias) as other:
            slow.begin().publish("slow", 2)
            other.begin().publish("other")
            commit(alias, "a", "b")
            result, states = batches(scan, state, limit)
            assert result == ["a1", "b1"]
            other.commit()
            slow.publish("slow")
            commit(alias, "c")
            result, later = batches(scan, states[-1], limit)
            assert sorted(result) == ["c1", "other1"]
            slow.commit()
            commit(alias, "slow")
            result, last = batches(scan, later[-1], limit)
            assert result == ["slow1", "slow2", "slow3", "slow4"]
        assert scan.end(last[-1], limit) == last[-1]
        # Read again after all that, each batch is as it was.
        assert names(batch(scan, state, states[-1])) == ["a1", "b1"]
        assert sorted(names(batch(scan, later[0], later[-1]))) == ["c1", "other1"]
        assert len(batch(scan, state, last[-1])) == 8

    @concurrent
    def test_a_late_commit_between_two_batches(self, alias, scan):
        state = scan.beginning()
        with Session(alias) as slow:
            slow.begin().publish("slow", 3)
            commit(alias, *"abcd")
            middle = scan.end(state, 2)
            assert names(batch(scan, state, middle)) == ["a1", "b1"]
            slow.commit()
        commit(alias, "slow")
        assert names(batch(scan, state, middle)) == ["a1", "b1"]
        result, end = read_all(scan, middle, 2)
        assert sorted(result) == ["c1", "d1", "slow1", "slow2", "slow3", "slow4"]
        versions = [name for name in result if name.startswith("slow")]
        assert versions == sorted(versions)
        assert names(batch(scan, middle, end)) == names(rows(scan, middle, end))

    @concurrent
    def test_more_late_rows_than_a_batch_holds(self, alias, scan):
        """Later versions of their stream must not come before them."""
        state = scan.beginning()
        with Session(alias) as slow:
            slow.begin().publish("s", 10)
            commit(alias, "a", "b")
            result, state = read_all(scan, state)
            assert result == ["a1", "b1"]
            slow.commit()
        commit(alias, "s", "s")
        result, _ = batches(scan, state, 3)
        assert result == [f"s{n}" for n in range(1, 13)]

    @concurrent
    def test_a_late_commit_below_a_bound(self, alias, scan):
        with Session(alias) as slow:
            slow.begin().publish("slow", 2)
            commit(alias, "a", "b")
            bound = scan.latest()
            result, state = read_all(scan, scan.beginning(), 1, bound)
            assert result == ["a1", "b1"]
            slow.commit()
        commit(alias, "c")
        result, state = read_all(scan, state, 1, bound)
        assert "c1" not in result
        result += read_all(scan, state)[0]
        assert sorted(result) == ["c1", "slow1", "slow2"]

    @concurrent
    def test_rows_come_in_the_order_their_writers_saw(self, alias, scan):
        state = scan.beginning()
        with Session(alias) as first, Session(alias) as second:
            second.begin().assign_xid()
            first.begin().assign_xid()
            first.publish("a")
            first.commit()
            assert second.do(lambda: Event.objects.using(alias).filter(stream="a").exists())
            second.publish("b")
            second.publish("a")
            second.commit()
        assert read_all(scan, state, 1)[0] == ["a1", "b1", "a2"]

    def test_a_transaction_that_spans_several_batches(self, alias, scan):
        state = scan.beginning()
        with Session(alias) as session:
            session.begin()
            events = [NewEvent(f"s{n % 7}-", "made") for n in range(1500)]
            session.do(lambda: len(publish_many(events, using=alias)))
            assert scan.end(state) == state
            session.commit()
        result, states = batches(scan, state, 400)
        assert len(result) == len(set(result)) == 1500
        assert len(states) == 5
        assert [name for name in result if name.startswith("s3-")][:2] == ["s3-1", "s3-2"]

    def test_parts_are_worth_a_reader(self, alias, scan, monkeypatch):
        commit(alias, *"abcdefgh")
        end = scan.end(scan.beginning())
        assert [len(scan.parts(scan.beginning(), end, n)) for n in (1, 2, 7)] == [1, 2, 7]
        monkeypatch.setattr("outbox_app.events.log.scan.MIN_POSITIONS", 10**9)
        assert len(scan.parts(scan.beginning(), end, 7)) == 1


def test_a_state_of_another_database(alias, scan):
    other = next(text for text in (MysqlState().dump(), '{"window":"sqlite","pos":0}')
                 if scan.state.window not in text)  # fmt: skip
    with pytest.raises(DamagedCursor, match="it was made on"):
        scan.state.load(other)


class ScanReader:
    """Batches of scans under stress: each is read in parts, and read again at the end."""

    def __init__(self, reader, *, seed):
        self.scan = reader.window
        self.dice = random.Random(seed)
        self.batches = []
        self.close = reader.close

    def start(self):
        return self.scan.beginning().dump()

    def read(self, state, limit):
        start = self.scan.state.load(state)
        end = self.scan.end(start, self.dice.choice([limit, limit, None]))
        found = rows(self.scan, start, end, self.dice.choice([1, 2, 7]))
        self.batches.append((start, end, found))
        return found, end.dump(), end != start

    def assert_same_again(self):
        for start, end, found in self.batches:
            assert rows(self.scan, start, end, 3) == found
        there = [(a, b, found) for a, b, found in self.batches if a != b]
        for _ in range(20):
            a, b = sorted(self.dice.sample(range(len(there)), 2))
            chain, at = [], there[a][0]
            for start, end, found in there[a : b + 1]:
                if start == at:  # otherwise a batch that was read after a crash, and later again
                    chain, at = chain + found, end
            assert rows(self.scan, there[a][0], at, 2) == sorted(chain)


def test_a_span_is_exact(alias, reader):
    scans = ScanReader(reader, seed=11)
    scans.close = lambda: None
    verdict = stress(alias, scans, count=20, seed=11)
    assert verdict.committed > 50
    assert verdict.exact, verdict
    scans.assert_same_again()


@concurrent
def test_naive_batches_are_caught(alias):
    verdict = stress(alias, by_id(alias), writers=3, count=5, seed=5)
    assert verdict.lost > 0, verdict
    assert not verdict.invented


def test_ranges(monkeypatch):
    monkeypatch.setattr("outbox_app.events.log.scan.MIN_POSITIONS", 10)
    assert ranges(5, 5, 3) == ranges(9, 5, 3) == []
    assert ranges(0, 9, 3) == [(0, 9)]
    assert ranges(0, 30, 2) == [(0, 15), (15, 30)]
    assert ranges(0, 35, 99) == [(0, 11), (11, 23), (23, 35)]


def test_parts_are_dealt_out():
    assert dealt([["a"], ["b"]], [["c"], ["d"]]) == [["a", "c"], ["b", "d"]]
    assert dealt([["a"]], [["c"], ["d"]]) == [["a", "c"], ["d"]]
    assert dealt([], []) == []
