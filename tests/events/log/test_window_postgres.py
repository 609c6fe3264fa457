"""PostgreSQL: the rows of a window, and the traps of snapshots."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from django.db import connections, transaction

from outbox_app.events.exceptions import DamagedCursor, ForeignCursor, UnsafeLog
from outbox_app.events.log.state import BEGINNING, PostgresState, Snapshot
from outbox_app.events.models import Event
from tests.faults.tools import on

from .conformance import commit, names, read_all, reading, unread
from .sessions import Session, execute, foreign_transaction

pytestmark = [pytest.mark.django_db(transaction=True), on("postgres")]


def test_a_window_never_changes(alias):
    with reading(alias) as reader, Session(alias) as slow, Session(alias) as other:
        state = reader.window.start(None)
        slow.begin().publish("slow", 2)
        other.begin().publish("other")
        commit(alias, "a", "b", "c", "d")
        other.commit()
        events, page = reader.read(state, 2)
        state = page.state
        assert state.hi
        expected = reader.read(state, 100).events
        slow.commit()
        commit(alias, "a", "e")
        assert reader.read(state, 100).events == expected
        result, state = read_all(reader, state, 1)
        assert sorted([*names(events), *result]) == sorted(
            ["a1", "b1", "c1", "d1", "other1", "slow1", "slow2", "a2", "e1"]
        )


def test_a_prepared_transaction(alias):
    name = connections[alias].settings_dict["NAME"]
    with reading(alias) as reader, Session(alias) as session:
        state = reader.window.start(None)
        session.begin().publish("a")
        session.begin().publish("b")
        session.commit()
        session.sql(f"PREPARE TRANSACTION '{name}'")
        try:
            session.commit()
            commit(alias, "c")
            result, state = read_all(reader, state)
            assert result == ["c1"]
        finally:
            execute(alias, f"COMMIT PREPARED '{name}'")
        assert read_all(reader, state)[0] == ["a1", "b1"]


def test_subtransactions_have_the_id_of_their_transaction(alias):
    with reading(alias) as reader, Session(alias) as session:
        state = reader.window.start(None)
        session.begin()
        for _ in range(70):  # more than a snapshot lists subtransactions of a session
            session.begin().publish("a")
            session.commit()
        commit(alias, "b")
        result, state = read_all(reader, state)
        assert result == ["b1"]
        session.commit()
        assert read_all(reader, state, 20)[0] == [f"a{n}" for n in range(1, 71)]


def test_an_older_transaction_may_write_the_later_version(alias):
    with reading(alias) as reader, Session(alias) as old, Session(alias) as new:
        state = reader.window.start(None)
        old.begin().assign_xid()
        new.begin().publish("a")
        new.commit()
        old.publish("a")
        old.commit()
        assert read_all(reader, state, 1)[0] == ["a1", "a2"]


def test_a_foreign_transaction_holds_nothing_up(alias):
    with reading(alias) as reader:
        state = reader.window.start(None)
        with foreign_transaction():
            commit(alias, "a")
            result, state = read_all(reader, state)
            assert result == ["a1"]
            commit(alias, "b")
            result, state = read_all(reader, state)
            assert result == ["b1"]
        assert read_all(reader, state)[0] == []


def test_a_look_while_a_transaction_is_in_flight(alias):
    """It opens no window, in which there would be nothing."""
    with reading(alias) as reader, Session(alias) as slow:
        start = reader.window.start(None)
        slow.begin().publish("slow")
        commit(alias, "a")
        _, state = read_all(reader, start)
        execute(alias, "SELECT pg_current_xact_id()")
        run, statements = reader.window.run, []
        reader.window.run = lambda *call: statements.append(call) or run(*call)
        page = reader.window.read(state, columns=["id"], limit=9, only=reader.only)
        assert not page.state.hi
        assert len(statements) == 2
        slow.rollback()


def test_a_look_with_no_new_transaction_at_all(alias):
    with reading(alias) as reader:
        state = reader.window.start(None)
        now = Snapshot.parse(state.lo), state.cluster
        reader.window._snapshot = lambda: now
        reader.window.run = None  # no statement
        page = reader.window.read(state, columns=["id"], limit=9, only=reader.only)
        assert page.state is state


def test_the_first_window_of_a_scan_does_not_look_at_each_row(alias):
    commit(alias, "a", "b")
    with reading(alias) as reader:
        now, cluster = reader.window._snapshot()
        run, statements = reader.window.run, []
        reader.window.run = lambda *call: statements.append(call[0]) or run(*call)
        assert reader.window._open(PostgresState(cluster, BEGINNING), now).hi == now.text
        [sql] = statements
        assert "txid" not in sql


def test_late_rows_beyond_a_page_that_is_short(alias, monkeypatch):
    """Where a page ends by its reach, the late transactions' rows keep to it too."""
    monkeypatch.setattr("outbox_app.events.log.windows.postgres.MAX_POSITIONS", 5)
    with reading(alias) as reader, Session(alias) as slow:
        state = reader.window.start(None)
        slow.begin().publish("slow", 4)
        commit(alias, "a")
        result, state = read_all(reader, state)
        assert result == ["a1"]
        commit(alias, *"bcdefghij")
        slow.publish("slow", 4)
        commit(alias, "slower")
        slow.commit()
        result, state = read_all(reader, state, 100)
        late = [f"slow{n}" for n in range(1, 9)]
        assert result == [*late[:4], *(f"{s}1" for s in "bcdefghij"), *late[4:], "slower1"]


def test_a_hole_is_passed_at_once(alias, monkeypatch):
    monkeypatch.setattr("outbox_app.events.log.windows.postgres.MAX_POSITIONS", 5)
    with reading(alias) as reader:
        state = reader.window.start(None)
        with transaction.atomic(using=alias):
            commit(alias, "a")
            execute(
                alias, "SELECT setval(pg_get_serial_sequence('outbox_event', 'id'), 1000000000000)"
            )
            commit(alias, "b")
        try:
            pages = []
            while not pages or pages[-1].more:
                pages.append(reader.read(state, 100).page)
                state = pages[-1].state
            assert sum(len(page.rows) for page in pages) == 2
            assert len(pages) < 6
        finally:
            execute(alias, "ALTER SEQUENCE outbox_event_id_seq RESTART")


def other_states(state):
    opened = replace(state, hi=state.lo, first=1, last=9)
    far = Snapshot.parse(state.lo).xmax + 10**9
    return [
        (replace(state, cluster="1"), "cluster 1"),
        (replace(opened, cluster="1"), "cluster 1"),
        (replace(state, lo=f"{far}:{far}:"), "set back"),
        (replace(opened, hi=f"{far}:{far}:"), "set back"),
    ]


def test_the_past_or_another_cluster(alias):
    commit(alias, "a")
    with reading(alias) as reader:
        for state, says in other_states(reader.window.start(None)):
            with pytest.raises(ForeignCursor, match=says):
                reader.window.verify(state)
            with pytest.raises(ForeignCursor, match=says):
                reader.read(state, 10)


def test_inside_a_transaction_that_has_written(alias):
    with reading(alias) as reader:
        state = reader.window.start(0)
        with transaction.atomic(using=alias):
            assert read_all(reader, state)[0] == []
            commit(alias, "a")
            for step in (
                lambda: reader.read(state, 10),
                lambda: reader.window.verify(state),
                lambda: reader.window.start(None),
            ):
                with pytest.raises(UnsafeLog, match="autocommit"):
                    step()
        assert read_all(reader, state)[0] == ["a1"]


def test_positions_in_blocks_are_refused(alias):
    with reading(alias) as reader:
        state = reader.window.start(0)
        reader.window.verify(state)
        try:
            execute(alias, "ALTER SEQUENCE outbox_event_id_seq CACHE 20")
            with pytest.raises(UnsafeLog, match="blocks"):
                reader.window.verify(state)
        finally:
            execute(alias, "ALTER SEQUENCE outbox_event_id_seq CACHE 1")


NEGATE = "UPDATE outbox_event SET txid = -txid WHERE txid > 0"


@pytest.mark.parametrize("limit", [1, 3, 100])
@pytest.mark.parametrize("where", ["beginning", "middle of a window", "between two", "end"])
def test_rebase(alias, limit, where):
    """As after a restore: the transaction ids of the rows are of no use any more."""
    with reading(alias) as reader, Session(alias) as slow:
        state = reader.window.start(0)
        commit(alias, "a", "b")
        slow.begin().publish("slow", 2)
        commit(alias, "c", "d", "a")
        if where == "middle of a window":
            state = reader.read(state, 3).page.state
            assert state.hi
        elif where != "beginning":
            state = read_all(reader, state)[1]
        commit(alias, "e", "f")
        slow.commit()
        if where == "end":
            state = read_all(reader, state)[1]
        expected = unread(reader, state)
        execute(alias, NEGATE)
        state = reader.window.rebase(state)
        assert unread(reader, state) == expected
        commit(alias, "new", "a")
        result, state = read_all(reader, state, limit)
        assert sorted(result) == sorted([*expected, "new1", "a3"])
        of_a = [name for name in result if name.startswith("a")]
        assert of_a == sorted(of_a)
        assert read_all(reader, state)[0] == []


@pytest.mark.parametrize("rebased", [False, True])
@pytest.mark.parametrize(
    ("passed", "expected"), [(False, {3, 4, 6, 7, 8, 9, 10}), (True, {4, 7, 9, 10})]
)
def test_what_a_state_has_passed(alias, rebased, passed, expected):
    """Of an open window its rows up to ``pos``; else what ``lo`` sees."""
    commit(alias, *"bcdefghij")
    rows = Event.objects.using(alias).order_by("id")
    for txid, row in enumerate(rows, 2):
        rows.filter(pk=row.pk).update(stream=txid, txid=-txid if rebased else txid)
    pos = row.pk if passed else 0
    state = PostgresState("1", "3:6:3,4", "4:9:4,7", pos=pos, first=1, last=row.pk)
    with reading(alias) as reader:
        if rebased:
            state = reader.window.rebase(state)
        assert unread(reader, state) == {f"{txid}1" for txid in expected}
        if rebased:
            assert set(read_all(reader, state, 3)[0]) == {f"{txid}1" for txid in expected}


def test_a_reader_that_begins_after_a_rebase(alias):
    commit(alias, "a", "b")
    execute(alias, NEGATE)
    commit(alias, "c")
    with reading(alias) as reader:
        assert read_all(reader, reader.window.start(0), 1)[0] == ["a1", "b1", "c1"]


def test_no_second_rebase_before_the_first_has_been_read(alias):
    commit(alias, "a", "b")
    with reading(alias) as reader:
        state = reader.window.start(0)
        execute(alias, NEGATE)
        state = reader.window.rebase(state)
        with pytest.raises(ForeignCursor, match="last rebase"):
            reader.window.rebase(state)
        _, state = read_all(reader, state)
        reader.window.rebase(state)


NONSENSE = ["", "5", "5:7", "5:7:6:", "a:7:", "5:b:", "5:7:x", "5:7:6,", "5:7:,6", "5:7:6,,6"]
NONSENSE += [" 5:7:", "7:5:", "5:7:9", "5:7:7", "5:7:4", "5:7:-6", "5_0:70:", "5:7:6 ", "5:7:\n"]
NONSENSE += ["\u0665:\u0667:", "5:" + "9" * 5000 + ":", None, 5]


def test_nonsense_snapshots(alias):
    for text in NONSENSE:
        with pytest.raises(DamagedCursor):
            Snapshot.parse(text)
        values = {"window": "postgresql", "cluster": "1", "lo": text, "hi": "", "pos": 0}
        values |= {"first": 0, "last": 0, "rebased": None}
        with pytest.raises(DamagedCursor):
            PostgresState.load(json.dumps(values))


@pytest.mark.parametrize(
    "damage",
    [
        {"hi": "5:6:"},
        {"hi": "7:20:7"},
        {"hi": "20:20:", "rebased": {}},
        {"rebased": {"lo": "1:1:"}},
        {"rebased": 5},
        {"rebased": {"cluster": "1", "lo": "x", "hi": "", "pos": 0, "first": 0, "last": 0}},
    ],
    ids=str,
)
def test_nonsense_states(alias, damage):
    good = {"window": "postgresql", "cluster": "1", "lo": "8:12:9", "hi": "", "pos": 0}
    good |= {"first": 0, "last": 0, "rebased": None}
    assert PostgresState.load(json.dumps(good)).lo == "8:12:9"
    with pytest.raises(DamagedCursor):
        PostgresState.load(json.dumps(good | damage))


def test_snapshots(alias):
    snapshot = Snapshot.parse("8:12:9,10")
    assert [xid for xid in range(7, 14) if snapshot.sees(xid)] == [7, 8, 11]
    assert not Snapshot.parse(BEGINNING).sees(-(2**61))
