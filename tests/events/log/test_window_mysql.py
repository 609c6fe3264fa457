"""MySQL and MariaDB: which gaps in the ids a window closes, and which it does not."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import timedelta

import pytest
from django.db import IntegrityError, OperationalError, connections, transaction

from outbox_app.events import NewEvent, publish, publish_many
from outbox_app.events.exceptions import DamagedCursor, ForeignCursor, TooManyGaps
from outbox_app.events.log.reader import LogReader
from outbox_app.events.log.state import MysqlState
from outbox_app.events.log.window import TOMBSTONE
from outbox_app.events.log.windows import mysql
from outbox_app.events.models import Event
from tests.events.log.own_log.models import Ledger
from tests.faults.tools import eventually, on
from tests.mysql import explain, plan_of
from tests.patience import patience

from .conformance import commit, names, read_all, reading, unread
from .sessions import Session, execute, truncate

pytestmark = [pytest.mark.django_db(transaction=True), on("mariadb")]


@pytest.fixture(autouse=True)
def log_is_new(alias):
    truncate(alias)


def runs(state):
    return [run[:2] for run in state.missing]


def rolled_back(alias, count=1):
    with Session(alias) as session:
        ids = session.begin().publish("gone", count)
        session.rollback()
    return ids[0], ids[-1]


def test_a_gap_is_closed_once_nothing_was_seen_of_it_for_the_settle_time(alias):
    with reading(alias) as reader:
        state = reader.window.start(None)
        gap = rolled_back(alias, 3)
        commit(alias, "a")
        reader.window.settle = 3600
        for _ in range(3):
            state = reader.read(state, 10).page.state
            assert runs(state) == [gap]
        reader.window.settle = 0
        assert runs(reader.read(state, 10).page.state) == []
        assert not Event.objects.using(alias).filter(type=TOMBSTONE).exists()


def test_a_gap_has_to_be_looked_at_twice(alias):
    with reading(alias) as reader:
        reader.window.settle = 0
        state = reader.window.start(None)
        gap = rolled_back(alias)
        commit(alias, "a")
        page = reader.read(state, 10).page
        assert runs(page.state) == [gap]
        assert runs(reader.read(page.state, 10).page.state) == []


def test_a_clock_that_was_set_back_begins_anew(alias):
    with reading(alias) as reader:
        state = reader.window.start(None)
        first, last = rolled_back(alias)
        commit(alias, "a")
        state = reader.read(state, 10).page.state
        since = state.missing[0][2]
        later = replace(state, missing=[(first, last, since + 3600)])
        reader.window.settle = 0
        page = reader.read(later, 10).page
        assert since <= page.state.missing[0][2] < since + 3600


def test_a_transaction_in_flight_keeps_its_gap_open_for_ever(alias):
    with reading(alias) as reader, Session(alias) as slow:
        reader.window.settle = 0
        state = reader.window.start(None)
        ids = slow.begin().publish("slow", 2)
        commit(alias, "a")
        gap = rolled_back(alias)
        commit(alias, "b")
        for _ in range(4):
            _, state = read_all(reader, state)
        assert runs(state) == [tuple(ids)]
        slow.commit()
        assert read_all(reader, state)[0] == ["slow1", "slow2"]
        assert gap not in runs(state)


def test_beside_a_row_in_flight_nothing_is_closed(alias):
    """The run rule: an INSERT of many rows has reserved all of its positions."""
    with reading(alias) as reader, Session(alias) as slow:
        reader.window.settle = 0
        state = reader.window.start(None)
        [first] = slow.begin().publish("slow")
        _, last = rolled_back(alias, 3)
        commit(alias, "a")
        for _ in range(3):
            state = reader.read(state, 10).page.state
            assert runs(state) == [(first, last)]
        slow.commit()
        events, page = reader.read(state, 10)
        assert names(events) == ["slow1"]
        assert runs(page.state) == [(first + 1, last)]
        assert runs(reader.read(page.state, 10).page.state) == []


def test_what_is_left_beside_a_row_that_came_begins_anew(alias):
    with reading(alias) as reader:
        commit(alias, "a")
        gap = rolled_back(alias, 2)
        commit(alias, "b")
        page = reader.read(MysqlState(gap[1], [(gap[0] - 1, gap[1], 1.0)]), 10).page
        assert runs(page.state) == [gap]


def test_a_reader_that_begins_waits_for_what_may_be_reserved(alias, monkeypatch):
    """A session has got the positions, and no row is there yet; but only near the end."""
    with reading(alias) as reader:
        commit(alias, "a")
        gap = rolled_back(alias, 2)
        commit(alias, "b", "c")
        assert runs(reader.window.start(None)) == [gap]
        assert runs(reader.window.start(gap[1] + 9)) == [gap]  # and for none that is to come
        monkeypatch.setattr(mysql, "LOOK_NEAR", 2)
        assert runs(reader.window.start(None)) == []


def test_a_reader_that_begins_waits_for_what_is_in_flight_far_below(alias, monkeypatch):
    monkeypatch.setattr(mysql, "LOOK_NEAR", 2)
    with reading(alias) as reader, Session(alias) as slow:
        slow.begin().publish("slow")
        commit(alias, *"aaaaa")
        state = reader.window.start(None)
        slow.commit()
        assert read_all(reader, state)[0] == ["slow1"]


def test_without_a_filter_no_more_rows_are_read_than_asked_for(alias):
    with reading(alias) as reader:
        commit(alias, *"abcde")
        run, read = reader.window.run, []
        reader.window.run = lambda *call: read.append(run(*call)) or read[-1]
        reader.read(reader.window.start(0), 2)
        assert max(map(len, read)) == 2


def test_an_insert_of_many_rows_that_waits_in_the_middle(alias):
    """Its second row waits for a unique key; the third has its position, and does not exist."""
    taken = "00000000-0000-4000-8000-000000000001"
    with reading(alias) as reader, Session(alias) as blocker, Session(alias) as bulk:
        reader.window.settle = 0
        state = reader.window.start(None)
        blocker.begin().publish("blocker", message_id=taken)
        events = [NewEvent("bulk", "made", message_id=id) for id in (None, taken, None)]
        bulk.begin()
        waiting = bulk.thread.submit(publish_many, events, using=alias)
        seen = "SELECT id FROM outbox_event FORCE INDEX (PRIMARY) WHERE stream = 'bulk'"
        eventually(lambda: len(reader._run_dirty(seen, [])) == 2, "the second row waits")
        commit(alias, "a", "b")
        for _ in range(3):
            _, state = read_all(reader, state)
        [gap] = runs(state)
        assert gap[1] - gap[0] == 3
        blocker.rollback()
        waiting.result(patience())
        bulk.commit()
        assert read_all(reader, state)[0] == ["bulk1", "bulk2", "bulk3"]


def test_a_view_that_is_no_cut(alias):
    """MariaDB shows version 2 without version 1, once in a while: here, always."""
    with reading(alias) as reader:
        state = reader.window.start(None)
        commit(alias, "a", "b", "a", "b", "a")
        run, hidden = reader.window.run, {"a1", "b1", "a2"}

        def view(sql, params):
            rows = run(sql, params)
            if "AS position" not in sql:
                return rows
            kept = [row for row in rows if f"{row[4]}{row[5]}" not in hidden]
            hidden.discard(max(hidden, default=""))
            return kept

        reader.window.run = view
        events, page = reader.read(state, 10)
        assert names(events) == ["a1", "b1", "a2", "b2", "a3"]
        assert runs(page.state) == []


def test_a_view_that_is_no_cut_on_small_pages(alias):
    with reading(alias) as reader:
        state = reader.window.start(None)
        commit(alias, *"aabbab")
        run, looks = reader.window.run, []

        def view(sql, params):
            rows = run(sql, params)
            if "AS position" in sql:
                looks.append(sql)
                if len(looks) % 3 == 1:
                    return rows[1:]
            return rows

        reader.window.run = view
        result = []
        for _ in range(10):
            events, page = reader.read(state, 2)
            result += names(events)
            state = page.state
        assert result == ["a1", "a2", "b1", "b2", "a3", "b3"]


def test_wide_runs_are_looked_at_without_reading_all_of_them(alias):
    with reading(alias) as reader, Session(alias) as slow:
        state = reader.window.start(None)
        slow.begin().publish("slow", 300)
        commit(alias, "a")
        state = reader.read(state, 10).page.state
        seen, _ = reader.window._look(list(state.missing))
        assert len(seen) == 1
        slow.commit()
        result, state = read_all(reader, state, 70)
        assert result == [f"slow{n}" for n in range(1, 301)]
        assert runs(state) == []


def test_runs_of_every_length_are_looked_at(alias, monkeypatch):
    monkeypatch.setattr(mysql, "WIDE", 2)
    with reading(alias) as reader, Session(alias) as slow:
        first, *rest = slow.begin().publish("slow", 5)
        assert all(reader.window._look([(first, last, None)])[0] for last in (first, *rest))


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_too_many_gaps(alias, monkeypatch, end):
    monkeypatch.setattr(mysql, "MAX_RUNS", 3)
    with reading(alias) as reader, Session(alias) as slow:
        reader.window.settle = 0
        state = reader.window.start(None)
        slow.begin()
        for _ in range(6):
            slow.publish("slow")
            commit(alias, "a")
        result, state = read_all(reader, state)
        assert result == [f"a{n}" for n in range(1, 7)]
        assert len(runs(state)) == 6
        commit(alias, "b")
        for _ in range(2):
            with pytest.raises(TooManyGaps, match="6 runs"):
                reader.read(state, 10)
        getattr(slow, end)()
        found = []
        for _ in range(4):
            more, state = read_all(reader, state)
            found += more
        assert found == [*(f"slow{n}" for n in range(1, 7) if end == "commit"), "b1"]
        assert runs(state) == []


def test_tombstones_seal(alias, settings):
    settings.OUTBOX = {**settings.OUTBOX, "TOMBSTONES": True}
    with reading(alias) as reader, reading(alias, types=["*"]) as other:
        reader.window.settle = 0
        state = late = reader.window.start(None)
        first, last = rolled_back(alias, 2)
        commit(alias, "a")
        _, state = read_all(reader, state)
        assert runs(state) == [(first, last)]
        state = reader.read(state, 10).page.state
        assert runs(state) == []
        assert read_all(reader, state)[0] == []
        assert read_all(other, late)[0] == ["a1"]
        sealed = Event.objects.using(alias).filter(type=TOMBSTONE).values_list("id", flat=True)
        assert list(sealed) == [first, last]
        writer = Event(id=last, stream="late", version=1, type="made", slice=0)
        with pytest.raises(IntegrityError, match="Duplicate"):
            writer.save(using=alias, force_insert=True)


def test_tombstones_seal_a_log_with_columns_of_its_own(alias, settings):
    """The database knows no default of theirs: the model's are written."""
    settings.OUTBOX = {**settings.OUTBOX, "TOMBSTONES": True}
    reader = LogReader(Ledger, using=alias)
    try:
        assert reader.window._seal(3, 5)
        assert not reader.window._seal(5, 6)
    finally:
        reader.close()
    sealed = list(Ledger.objects.using(alias).order_by("id"))
    assert [(row.id, row.type, row.currency, row.remark) for row in sealed] == [
        (id, "$tombstone", "%s'", "") for id in (3, 4, 5)
    ]
    assert len({row.booking for row in sealed}) == 3
    assert all(row.booked_at and row.note is None for row in sealed)
    with transaction.atomic(using=alias):
        event = publish("a", "made", log=Ledger)
    assert event.booked_at is not None


def test_a_tombstone_above_all_events_has_the_time_that_an_event_would_get(alias, settings):
    """A replay from a time looks for it among the times of the rows, which grow with the ids.

    Where ``USE_TZ`` is off, they are in the zone of the sessions.
    """
    settings.OUTBOX = {**settings.OUTBOX, "TOMBSTONES": True}
    default = "ALTER TABLE outbox_event ALTER recorded_at SET DEFAULT"
    execute(alias, f"{default} (CURRENT_TIMESTAMP(6))")
    try:
        with reading(alias) as reader:
            execute(alias, "SET SESSION time_zone = '-05:00'")
            commit(alias, "a")
            event = Event.objects.using(alias).get()
            assert reader.window._seal(event.pk + 1, event.pk + 1)
        sealed = Event.objects.using(alias).get(type=TOMBSTONE)
        assert abs(sealed.recorded_at - event.recorded_at) < timedelta(minutes=30)
    finally:
        execute(alias, f"{default} (UTC_TIMESTAMP(6))")
        connections[alias].close()  # with its time zone


def test_a_run_that_is_too_long_is_closed_without_tombstones(alias, settings, monkeypatch):
    """As AUTO_INCREMENT makes one, when it is set."""
    settings.OUTBOX = {**settings.OUTBOX, "TOMBSTONES": True}
    monkeypatch.setattr(mysql, "MAX_SEALED", 3)
    with reading(alias) as reader:
        assert reader.window._seal(11, 14)
        assert not Event.objects.using(alias).exists()
        assert reader.window._seal(11, 13)
        assert Event.objects.using(alias).count() == 3


def test_an_event_in_flight_behind_a_run_is_not_waited_for(alias, settings):
    settings.OUTBOX = {**settings.OUTBOX, "TOMBSTONES": True}
    execute(alias, "SET SESSION innodb_lock_wait_timeout = 1")
    with reading(alias) as reader, Session(alias) as slow:
        first, last = rolled_back(alias)
        slow.begin().publish("slow")
        assert reader.window._seal(first, last)
        assert Event.objects.using(alias).get().pk == first
    connections[alias].close()  # with its bound


def test_a_row_that_came_while_it_was_to_be_sealed(alias, settings):
    settings.OUTBOX = {**settings.OUTBOX, "TOMBSTONES": True}
    with reading(alias) as reader:
        commit(alias, "a")
        id = Event.objects.using(alias).get().pk
        assert not reader.window._seal(id, id + 3)
        assert Event.objects.using(alias).count() == 1


def test_a_dirty_connection_is_one_that_reads_dirty(alias, monkeypatch):
    """One that could not be set up must not be used as it is: it would see nothing in flight."""
    with reading(alias) as reader, Session(alias) as slow:
        reader.window.settle = 0
        state = reader.window.start(None)
        slow.begin().publish("slow")
        commit(alias, "a")
        create = connections.create_connection

        def refused(using):
            connection = create(using)
            connect, refusals = connection.connect, [OperationalError("Too many connections")]

            def once():
                if refusals:
                    raise refusals.pop()
                connect()

            connection.connect = once
            return connection

        with monkeypatch.context() as patched:
            patched.setattr(connections, "create_connection", refused)
            for _ in range(2):
                with pytest.raises(OperationalError, match="Too many"):
                    reader.read(state, 10)
        for _ in range(3):
            _, state = read_all(reader, state)
        slow.commit()
        assert read_all(reader, state)[0] == ["slow1"]


def test_the_readers_of_a_thread_share_one_dirty_connection(alias, monkeypatch):
    """Else a process that runs a hundred subscriptions takes all that the server has."""
    made, create = [], connections.create_connection

    def note(using):
        made.append(create(using))
        return made[-1]

    monkeypatch.setattr(connections, "create_connection", note)
    settings = {**connections[alias].settings_dict}  # as a called command's, with its timeouts
    monkeypatch.setattr(connections[alias], "settings_dict", settings)
    with Session(alias) as slow, reading(alias) as one:
        state = one.window.start(None)
        slow.begin().publish("slow")
        commit(alias, "a")
        made.clear()
        with reading(alias) as other:
            assert read_all(one, state)[0] == read_all(other, state)[0] == ["a1"]
        assert len(made) == 1
        assert made[0].settings_dict is settings
        assert made[0].connection is not None  # the first one needs it
    assert made[0].connection is None


@pytest.fixture
def elsewhere(alias, monkeypatch):
    """``elsewhere()``: connect the alias to another database, with a copy of the log."""
    here = connections[alias].settings_dict["NAME"]
    there = f"{here}_moved"
    execute(alias, f"CREATE DATABASE {there}")

    def move() -> None:
        for table in ("outbox_event", "outbox_stream"):
            execute(alias, f"CREATE TABLE {there}.{table} LIKE {table}")
            execute(alias, f"INSERT INTO {there}.{table} SELECT * FROM {table}")
        monkeypatch.setitem(connections[alias].settings_dict, "NAME", there)
        connections[alias].close()

    yield move
    execute(alias, f"DROP DATABASE {there}")
    monkeypatch.undo()
    connections[alias].close()


def test_dirty_reads_go_where_the_alias_leads(alias, elsewhere):
    """After a switch-over the old primary still answers, and has nothing in flight."""
    with reading(alias) as reader:
        reader.window.settle = 0
        state = reader.window.start(None)
        rolled_back(alias)
        commit(alias, "a")
        _, state = read_all(reader, state)
        elsewhere()
        with Session(alias) as slow:
            slow.begin().publish("slow")
            commit(alias, "b")
            for _ in range(3):
                _, state = read_all(reader, state)
            slow.commit()
        assert read_all(reader, state)[0] == ["slow1"]


def test_a_restored_database(alias):
    with reading(alias) as reader:
        commit(alias, "a")
        state = reader.window.start(None)
        reader.window.verify(state)
        Event.objects.using(alias).all().delete()
        reader.window.verify(state)
        truncate(alias)
        with pytest.raises(ForeignCursor, match="restored"):
            reader.window.verify(state)


def test_a_rebase_takes_no_position_that_is_given_out_again(alias):
    state = MysqlState(9, [(2, 3, None), (5, 7, 1.5), (8, 9, None)])
    with reading(alias) as reader:
        assert reader.window.rebase(state, 6) == MysqlState(6, [(2, 3, None), (5, 6, 1.5)])


def test_data_of_rows_that_are_not_wanted_is_not_fetched(alias):
    commit(alias, "a", "b", "c", "d")
    with reading(alias, parts=2, part=0) as reader:
        rows = reader.window._rows(
            0, [], columns=("id", "data", "metadata"), limit=9, only=reader.only
        )
        assert len(rows) == 4
        assert {row[3] is None for row in rows if not row[1]} == {True}
        assert {row[3] is None for row in rows if row[1]} == {False}


NONSENSE = [
    None,
    "",
    {},
    {"1": 2},
    [1],
    [[1, 2]],
    [[2, 1, None]],
    [[0, 1, None]],
    [[-1, 1, None]],
    [[1, 10, None]],
    [[1, 2, None], [2, 3, None]],
    [[3, 4, None], [1, 2, None]],
    [[1, 2, "x"]],
    [[1, 2, True]],
    [[1, 2, float("nan")]],
    [[1, 2, float("inf")]],
    [[1.0, 2, None]],
    [["1", "2", None]],
    [[True, 2, None]],
]


def test_nonsense_runs(alias):
    for missing in NONSENSE:
        text = json.dumps({"window": "mysql", "high": 9, "missing": missing})
        with pytest.raises(DamagedCursor):
            MysqlState.load(text)


def test_unread_is_a_condition_of_ranges(alias):
    state = MysqlState(9, [(2, 3, None), (5, 5, 1.5)])
    commit(alias, *"abcdefghijkl")
    with reading(alias) as reader:
        assert unread(reader, state) == {"b1", "c1", "e1", "j1", "k1", "l1"}
        sql = f"SELECT id FROM outbox_event WHERE {reader.window.unread(state)}"
        with connections[alias].cursor() as cursor:
            cursor.execute(explain(sql))
            assert plan_of(cursor)[0]["type"] in ("range", "index")


def test_what_cursors_wait_for_is_looked_for_however_far_below(alias, monkeypatch):
    monkeypatch.setattr(mysql, "LOOK_BACK", 3)
    with reading(alias) as reader, Session(alias) as late, Session(alias) as gone:
        state = reader.window.start(None)
        [first] = late.begin().publish("late")
        [second] = gone.begin().publish("gone")
        for _ in range(9):
            commit(alias, "a")
        state = reader.read(state, 100).page.state
        assert runs(state) == [(first, second)]
        others = [state, MysqlState(second, [(first, first, None)])]
        assert runs(reader.window.start(None)) == []
        moved = reader.window.move(None, others)
        assert runs(moved) == [(first, second)]
        apart = [MysqlState(second, [(each, each, None)]) for each in (first, second)]
        assert runs(reader.window.move(None, apart)) == [(first, second)]
        late.commit()
        assert runs(reader.window.move(None, others)) == [(second, second)]
        gone.rollback()
        found, _ = reader.read(moved, 100)
        assert [event.stream for event in found] == ["late"]


@pytest.mark.parametrize("back", [100, 11, 10, 9, 3])
def test_what_cursors_wait_for_is_kept_though_nothing_is_seen_of_it(alias, monkeypatch, back):
    """A session stays between three positions and their rows; the log goes on."""
    monkeypatch.setattr(mysql, "LOOK_NEAR", 2)
    monkeypatch.setattr(mysql, "LOOK_BACK", back)
    with reading(alias) as reader:
        state = reader.window.start(None)
        gap = rolled_back(alias, 3)
        commit(alias, *"aaaaaaaaa")
        state = reader.read(state, 100).page.state
        assert runs(state) == [gap]
        assert runs(reader.window.start(None)) == []
        moved = reader.window.move(None, [state, MysqlState(gap[0], [(gap[0], gap[0], None)])])
        assert runs(moved) == [gap]
        Event.objects.using(alias).create(id=gap[0], stream="late", version=1, type="x", slice=0)
        assert names(reader.read(moved, 100).events) == ["late1"]
