"""What every window has to do. Derive a test class from ``WindowConformance`` to hold one to it.

The tests ask for the fixture ``alias``; the window is the one that ``LogReader`` takes there. Where
two transactions write at once, SQLite is left out: it refuses the second one.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.db import transaction

from outbox_app.events import NewEvent, publish, publish_many
from outbox_app.events.log.filter import EventFilter
from outbox_app.events.log.reader import LogReader
from outbox_app.events.log.window import TOMBSTONE
from outbox_app.events.models import Event, StreamHead

from .sessions import Session, truncate

concurrent = pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)


@contextmanager
def reading(alias: str, **options: Any) -> Iterator[LogReader]:
    """A reader that ends with the block; options are ``EventFilter``'s."""
    reader = LogReader(Event, using=alias, only=EventFilter(**options))
    try:
        yield reader
    finally:
        reader.close()


def commit(alias: str, *streams: str, **options: Any) -> None:
    """Publish an event for each, one transaction each."""
    for stream in streams:
        with transaction.atomic(using=alias):
            publish(stream, options.get("type", "made"), topic=options.get("topic", ""))


def names(events: Any) -> list[str]:
    """Streams and versions, for example ``a1``."""
    return [f"{event.stream}{event.version}" for event in events]


def unread(reader: LogReader, state: Any) -> set[str]:
    """What the condition says will still come."""
    condition = f"{reader.window.unread(state)} AND type <> '{TOMBSTONE}'"
    rows = reader.run(f"SELECT stream, version FROM outbox_event WHERE {condition}", [])
    return {f"{stream}{version}" for stream, version in rows}


def read_all(reader: LogReader, state: Any, limit: int = 100) -> tuple[list[str], Any]:
    """Read until there is nothing more; each state goes through the table's text, and each page
    is read twice. Returns names, and the last state."""
    result: list[str] = []
    while True:
        before = reader.load(state.dump())
        left = unread(reader, before)
        events, page = reader.read(before, limit)
        again, _ = reader.read(before, limit)
        assert names(again) == names(events)
        assert len(events) <= limit * reader.only.parts
        assert page.position >= max((event.id for event in events), default=0)
        if reader.only == EventFilter():
            assert set(names(events)) <= left
            assert unread(reader, page.state) == left - set(names(events))
        result += names(events)
        state = page.state
        if not page.more:
            return result, state


#: Filters of a reader, and which of the events it is given.
TYPES = [
    (["order.placed"], [0]),
    (["order.*"], [0, 1]),
    (["Order.*"], [2]),
    (["100%*"], [3]),
    (["100_*"], [4]),
    (["it's"], [5]),
    (['say "*'], [6]),
    (["a**"], [7]),
    (["日本*"], [8]),
    (["back\\*"], [9]),
    (["order.placed", "100%*", "none"], [0, 3]),
    (["*"], range(11)),
    (["x"], []),
    (["x "], [10]),
    ([], []),
    (None, range(11)),
]
TOPICS = [(["eu"], ["a1"]), (["eu", "%"], ["a1", "c1"]), ([""], ["d1"]), ([], [])]


class WindowConformance:
    """One test a promise."""

    @pytest.fixture(autouse=True)
    def log_is_new(self, alias):
        truncate(alias)

    def test_from_the_beginning_from_now_and_after_a_position(self, alias):
        with reading(alias) as reader:
            empty = reader.window.start(0)
            commit(alias, "a", "b")
            middle = Event.objects.using(alias).order_by("id").first().pk
            states = [empty] + [reader.window.start(after) for after in (0, middle, None)]
            commit(alias, "c")
            found = [read_all(reader, state)[0] for state in states]
            everything = ["a1", "b1", "c1"]
            assert found == [everything, everything, ["b1", "c1"], ["c1"]]

    def test_an_empty_log(self, alias):
        with reading(alias) as reader:
            for after in (0, None):
                result, state = read_all(reader, reader.window.start(after))
                assert result == []
                reader.window.verify(state)
                commit(alias, "a")
                assert read_all(reader, state)[0] == ["a1"]
                Event.objects.using(alias).all().delete()
                StreamHead.objects.using(alias).all().delete()

    def test_a_look_with_nothing_new(self, alias):
        """On PostgreSQL another transaction may have come, which has written nothing here."""
        with reading(alias) as reader:
            start = reader.window.start(0)
            commit(alias, "a")
            _, state = read_all(reader, start)
            run, statements = reader.window.run, []
            reader.window.run = lambda *call: statements.append(call) or run(*call)
            page = reader.window.read(state, columns=["id"], limit=9, only=reader.only)
            assert (page.rows, page.more) == ([], False)
            assert len(statements) <= (2 if alias == "postgres" else 1)

    @pytest.mark.parametrize("limit", [1, 2, 3, 6, 7, 100])
    def test_pages_of_every_size(self, alias, limit):
        with reading(alias) as reader:
            start = reader.window.start(0)
            commit(alias, "a", "b", "a", "c", "b", "a", "d")
            expected = ["a1", "b1", "a2", "c1", "b2", "a3", "d1"]
            result, state = read_all(reader, start, limit)
            assert result == expected
            commit(alias, "d")
            result, state = read_all(reader, state, limit)
            assert result == ["d2"]
            assert read_all(reader, state, limit)[0] == []

    def test_nothing_comes_before_it_is_committed(self, alias):
        with reading(alias) as reader, Session(alias) as session:
            state = reader.window.start(None)
            session.begin().publish("a", 3)
            result, state = read_all(reader, state)
            assert result == []
            session.commit()
            assert read_all(reader, state)[0] == ["a1", "a2", "a3"]

    def test_savepoints_and_transactions_that_roll_back(self, alias):
        with reading(alias) as reader, Session(alias) as session:
            state = reader.window.start(None)
            session.begin().publish("a")
            session.begin().publish("gone")
            session.rollback()
            session.begin().publish("b")
            session.commit()
            session.publish("a")
            session.commit()
            session.begin().publish("gone", 5)
            session.rollback()
            commit(alias, "c")
            result, state = read_all(reader, state, 2)
            assert result == ["a1", "b1", "a2", "c1"]
            assert read_all(reader, state)[0] == []

    @concurrent
    def test_a_lower_position_that_commits_later(self, alias):
        with reading(alias) as reader, Session(alias) as slow, Session(alias) as fast:
            state = reader.window.start(None)
            slow.begin().publish("slow", 2)
            fast.begin().publish("fast")
            fast.commit()
            result, state = read_all(reader, state)
            assert result == ["fast1"]
            slow.publish("slow")
            fast.begin().publish("fast")
            fast.commit()
            result, state = read_all(reader, state)
            assert result == ["fast2"]
            slow.commit()
            commit(alias, "fast")
            assert read_all(reader, state)[0] == ["slow1", "slow2", "slow3", "fast3"]

    @concurrent
    def test_a_late_commit_between_two_pages(self, alias):
        with reading(alias) as reader, Session(alias) as slow:
            state = reader.window.start(None)
            slow.begin().publish("slow")
            commit(alias, "a", "b", "c", "d")
            events, page = reader.read(state, 2)
            assert names(events) == ["a1", "b1"]
            slow.commit()
            result, state = read_all(reader, page.state, 2)
            assert sorted(result) == ["c1", "d1", "slow1"]
            assert read_all(reader, state)[0] == []

    @concurrent
    def test_more_late_rows_than_a_page_holds(self, alias):
        """A stream whose next version was read in the same page must not overtake them."""
        with reading(alias) as reader, Session(alias) as slow:
            state = reader.window.start(None)
            slow.begin().publish("s", 10)
            commit(alias, "a", "b")
            result, state = read_all(reader, state)
            assert result == ["a1", "b1"]
            slow.commit()
            commit(alias, "s", "s")
            result, state = read_all(reader, state, 3)
            assert result == [f"s{n}" for n in range(1, 13)]
            assert unread(reader, state) == set()

    @concurrent
    @pytest.mark.parametrize("after", [None, 0, "top"])
    def test_what_is_in_flight_at_the_start_comes_when_it_commits(self, alias, after):
        with reading(alias) as reader, Session(alias) as slow:
            slow.begin().publish("slow", 3)
            commit(alias, "a", "b")
            if after == "top":
                after = Event.objects.using(alias).latest("pk").pk
            state = reader.window.start(after)
            slow.commit()
            commit(alias, "c")
            result, state = read_all(reader, state)
            early = ["a1", "b1"] if after == 0 else []
            assert sorted(result) == sorted([*early, "slow1", "slow2", "slow3", "c1"])
            assert read_all(reader, state)[0] == []

    @concurrent
    def test_rows_come_in_the_order_their_writers_saw(self, alias):
        """``b`` was written by one who saw ``a``, and ``a`` waited for by readers of both."""
        with reading(alias) as reader, Session(alias) as first, Session(alias) as second:
            state = reader.window.start(None)
            second.begin().assign_xid()
            first.begin().assign_xid()
            first.publish("a")
            first.commit()
            assert second.do(lambda: Event.objects.using(alias).filter(stream="a").exists())
            second.publish("b")
            second.publish("a")
            second.commit()
            assert read_all(reader, state, 1)[0] == ["a1", "b1", "a2"]

    def test_many_rows_in_one_call(self, alias):
        with reading(alias) as reader, Session(alias) as session:
            state = reader.window.start(None)
            session.begin()
            events = [NewEvent(f"s{i % 7}-", "made") for i in range(1500)]
            session.do(lambda: len(publish_many(events, using=alias)))
            assert read_all(reader, state)[0] == []
            session.commit()
            result, state = read_all(reader, state, 400)
            assert len(result) == len(set(result)) == 1500
            assert [name for name in result if name.startswith("s3-")][:3] == [
                "s3-1",
                "s3-2",
                "s3-3",
            ]

    def test_types(self, alias):
        given = ["order.placed", "order.", "Order.placed", "100%", "100_", "it's", 'say "x"']
        given += ["a*b", "日本語", "back\\slash", "x "]
        with reading(alias) as reader:
            start = reader.window.start(0)
        with transaction.atomic(using=alias):
            publish_many(NewEvent(f"s{i}-", type) for i, type in enumerate(given))
        for types, expected in TYPES:
            with reading(alias, types=types) as reader:
                result, state = read_all(reader, start, 3)
                assert result == [f"s{i}-1" for i in expected], types
                assert unread(reader, state) == set()

    def test_topics(self, alias):
        with reading(alias) as reader:
            start = reader.window.start(0)
        for stream, topic in (("a", "eu"), ("b", "EU"), ("c", "%"), ("d", "")):
            commit(alias, stream, topic=topic)
        for topics, expected in TOPICS:
            with reading(alias, topics=topics) as reader:
                assert read_all(reader, start, 1)[0] == expected, topics

    @pytest.mark.parametrize("limit", [1, 4, 100])
    def test_parts_share_the_log(self, alias, limit):
        commit(alias, *(f"s{i % 13}-" for i in range(40)))
        with reading(alias) as reader:
            everything = read_all(reader, reader.window.start(0), 7)[0]
        shares = []
        for part in range(3):
            with reading(alias, parts=3, part=part, types=["made"]) as reader:
                result = read_all(reader, reader.window.start(0), limit)[0]
                assert result == [name for name in everything if name in set(result)]
                shares.append(result)
        assert sorted(name for share in shares for name in share) == sorted(everything)
        assert len({name.rsplit("-")[0] for name in shares[0]} & {*shares[1], *shares[2]}) == 0
        assert all(shares)

    @concurrent
    def test_unread_and_read_agree_whatever_is_in_flight(self, alias):
        """``read_all`` compares them after each page; here with pages in the middle of it all."""
        with reading(alias) as reader, Session(alias) as one, Session(alias) as two:
            state = reader.window.start(0)
            one.begin().publish("one", 2)
            commit(alias, "a", "b", "c")
            two.begin().publish("two")
            commit(alias, "d")
            page = reader.read(state, 2).page
            assert unread(reader, page.state) == {"c1", "d1"}
            one.commit()
            assert unread(reader, page.state) == {"c1", "d1", "one1", "one2"}
            commit(alias, "e")
            rest, state = read_all(reader, page.state, 1)
            assert sorted(rest) == ["c1", "d1", "e1", "one1", "one2"]
            two.commit()
            assert unread(reader, state) == {"two1"}
            assert read_all(reader, state)[0] == ["two1"]

    def test_a_hole_is_passed_at_once(self, alias, monkeypatch):
        """As where the rows of another database were loaded, with their positions."""
        for module in ("postgres", "sqlite"):
            monkeypatch.setattr(f"outbox_app.events.log.windows.{module}.MAX_POSITIONS", 5)
        commit(alias, "a", "b")
        loaded = Event.objects.using(alias).get(stream="b")
        Event.objects.using(alias).filter(pk=loaded.pk).delete()
        loaded.pk += 1000
        loaded.save(using=alias, force_insert=True)
        with reading(alias) as reader:
            state, found = reader.window.start(loaded.pk - 1002), []
            for _ in range(5):
                events, page = reader.read(state, 100)
                state = page.state
                found += names(events)
            assert found == ["a1", "b1"]
            assert not page.more

    def test_few_wanted_rows_do_not_make_a_page_long(self, alias, monkeypatch):
        for module in ("postgres", "sqlite"):
            monkeypatch.setattr(f"outbox_app.events.log.windows.{module}.MAX_POSITIONS", 10)
        monkeypatch.setattr("outbox_app.events.log.windows.mysql.MIN_ROWS", 10)
        with reading(alias, types=["rare"]) as reader:
            commit(alias, "first")
            state = reader.window.start(None)
            commit(alias, *["x"] * 35)
            commit(alias, "y", type="rare")
            found, pages = [], 0
            while unread(reader, state):
                events, page = reader.read(state, 10)
                found += names(events)
                state, pages = page.state, pages + 1
                assert page.more or not unread(reader, state)
            assert found == ["y1"]
            assert 3 <= pages <= 6
