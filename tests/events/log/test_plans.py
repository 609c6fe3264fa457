"""The cost of a page is that of its rows, at a million rows: from EXPLAIN and handler counters.

Statistics are stale (gathered at a thousand rows), missing, or fresh; the window is small and at
the end, or the whole table; a long transaction's rows come late. The tests make the rows, with
chosen transaction ids, so they also give the window its snapshots.
"""

from __future__ import annotations

import re

import pytest
from django.db import connections

from outbox_app.events.log.filter import EventFilter
from outbox_app.events.log.state import BEGINNING, MysqlState, PostgresState
from outbox_app.events.log.windows.mysql import MysqlWindow
from outbox_app.events.log.windows.postgres import PostgresWindow
from tests.faults.tools import on
from tests.mysql import numbers
from tests.servers.mysql import MARIADB

from .sessions import execute, run

ROWS = 1_000_000
LIMIT = 500
COLUMNS = ("id", "stream", "version", "type", "data")
#: Began before all others, wrote each 400th row, and ended last. Others wrote five rows each.
LONG = 500
END = 1001 + ROWS // 5
HI = f"{END}:{END}:"
DATA = '{"total": "12.50", "lines": [1, 2, 3]}'


@pytest.fixture(scope="module")
def big_postgres(django_db_setup, django_db_blocker):
    def fill(first, last):
        execute(
            "postgres",
            f"INSERT INTO big SELECT i, CASE WHEN i % 400 = 0 THEN {LONG} ELSE 1000 + i / 5 END, "
            f"'stream-' || i % 5000, i / 5000, 'order.placed', '{DATA}', i % 1024 "
            f"FROM generate_series({first}, {last}) i",
        )

    with django_db_blocker.unblock():
        execute(
            "postgres",
            "CREATE TABLE big (id bigint PRIMARY KEY, txid bigint NOT NULL, stream text, "
            "version bigint, type text, data jsonb, slice int) WITH (autovacuum_enabled = off)",
        )
        execute("postgres", "CREATE INDEX ON big (txid, id)")
        fill(1, 1000)
        execute("postgres", "ANALYZE big")
        fill(1001, ROWS)
        yield
        execute("postgres", "DROP TABLE big")
        connections["postgres"].close()


class Explained(PostgresWindow):
    """Sees the snapshot it is given, and notes the buffers and the plan of each statement."""

    def __init__(self, now: str) -> None:
        super().__init__("big", self.explain)
        self.now = now
        self.costs: list[tuple[int, str]] = []

    def explain(self, sql, params):
        if "pg_current_snapshot" in sql:
            return [(self.now, False, False, "1", False)]
        lines = run("postgres", f"EXPLAIN (ANALYZE, BUFFERS, COSTS OFF) {sql}", params)
        plan = "\n".join(line for (line,) in lines)
        # The first line of buffers is the whole statement's.
        found = re.search(r"Buffers: shared(?: hit=(\d+))?(?: read=(\d+))?", plan)
        assert found, plan
        self.costs.append((int(found[1] or 0) + int(found[2] or 0), plan))
        return run("postgres", sql, params)


def read_postgres(state, *, now=HI, count=1, most, **only):
    """Read pages, none of whose statements may use more buffers. Returns positions and state."""
    window = Explained(now)
    ids = []
    for _ in range(count):
        page = window.read(state, columns=COLUMNS, limit=LIMIT, only=EventFilter(**only))
        ids += [row[0] for row in page.rows]
        state = page.state
    for buffers, plan in window.costs:
        assert buffers <= most, f"{buffers} buffers\n{plan}"
        assert "Seq Scan" not in plan, plan
    return ids, state


@on("postgres")
@pytest.mark.django_db
class TestPostgres:
    """Buffers are of 8 KiB; 500 rows lie in some fifteen."""

    @pytest.fixture(autouse=True, params=["stale", "missing", "fresh"])
    def statistics(self, request, alias, big_postgres):
        """The statistics of a test. They are rolled back with it."""
        if request.param == "missing":
            execute(alias, "DELETE FROM pg_statistic WHERE starelid = 'big'::regclass")
            execute(alias, "UPDATE pg_class SET reltuples = -1 WHERE oid = 'big'::regclass")
        elif request.param == "fresh":
            execute(alias, "ANALYZE big")

    @pytest.mark.parametrize("count", [3, 200, 3000])
    def test_a_small_window_at_the_end(self, count):
        first = END - 1 - count // 5
        state = PostgresState("1", f"{first}:{first}:")
        ids, state = read_postgres(state, most=60 + count // 20)
        expected = [i for i in range((first - 1000) * 5, ROWS + 1) if i % 400]
        assert ids == expected[:LIMIT]

    @pytest.mark.parametrize("pos", [0, ROWS // 2, ROWS - 700])
    @pytest.mark.parametrize("lo", [BEGINNING, "1000:1000:"])
    def test_a_backlog_of_the_whole_table(self, lo, pos):
        state = PostgresState("1", lo, HI, pos, 1, ROWS)
        ids, _ = read_postgres(state, count=2, most=60)
        expected = (i for i in range(pos + 1, ROWS + 1) if lo == BEGINNING or i % 400)
        assert ids == [i for i, _ in zip(expected, range(2 * LIMIT), strict=False)][: len(ids)]
        assert len(ids) >= 690

    def test_where_little_is_wanted(self):
        """Bounded by the positions that a page may pass."""
        state = PostgresState("1", BEGINNING, HI, 0, 1, ROWS)
        ids, state = read_postgres(state, most=3500, types=["none"])
        assert (ids, state.pos) == ([], 100_000)
        ids, _ = read_postgres(state, most=700, parts=32, part=3)
        assert len(ids) == LIMIT

    def test_a_transaction_that_began_before_and_is_in_flight(self):
        hi = f"{LONG}:{END}:{LONG}"
        state = PostgresState("1", f"{LONG}:{END - 300}:{LONG}")
        ids, _ = read_postgres(state, now=hi, most=120)
        assert ids[0] == ROWS - 299 * 5
        assert not [i for i in ids if i % 400 == 0]

    def test_its_rows_come_late(self):
        """Each lies in a block of its own; with them comes what was written since."""
        running = ",".join(map(str, range(300, LONG + 1)))
        state = PostgresState("1", f"300:{END - 100}:{running}")
        window = Explained(HI)
        page = window.read(state, columns=COLUMNS, limit=LIMIT, only=EventFilter())
        assert [row[0] for row in page.rows] == [400 * i for i in range(1, LIMIT + 1)]
        assert len(window.costs) == 2
        for buffers, plan in window.costs:
            # 201 index descents, and a block a row.
            assert buffers <= 201 * 4 + LIMIT * 2, f"{buffers} buffers\n{plan}"
            assert "Seq Scan" not in plan, plan
        ids, state = read_postgres(page.state, count=5, most=201 * 4 + LIMIT * 2)
        rest = range((LIMIT + 1) * 400, ROWS + 1, 400)
        recent = [i for i in range(ROWS - 99 * 5, ROWS + 1) if i % 400]
        assert ids == sorted({*rest, *recent})


@on("postgres")
@pytest.mark.django_db
@pytest.mark.parametrize("parts", [1, 32])
def test_a_page_of_a_small_log_is_an_index_range(alias, parts):
    """The planner would rather read and sort all of it where it takes a window's rows for rare."""
    execute(
        alias,
        "CREATE TABLE small (id bigint PRIMARY KEY, txid bigint NOT NULL, stream text, "
        "version bigint, type text, data jsonb, slice int)",
    )
    execute(
        alias,
        f"INSERT INTO small SELECT i, 1000 + i / 5, 'stream-' || i % 500, i / 500, 'order.placed', "
        f"'{DATA}', i % 1024 FROM generate_series(1, 20000) i",
    )
    execute(alias, "CREATE INDEX ON small (txid, id)")
    execute(alias, "ANALYZE small")
    window = Explained(HI)
    window.source = "small"
    state = PostgresState("1", BEGINNING, HI, 0, 1, 20_000)
    page = window.read(state, columns=COLUMNS, limit=LIMIT, only=EventFilter(parts=parts, part=0))
    assert len(page.rows) == LIMIT
    ((buffers, plan),) = window.costs
    assert "Index Scan" in plan, plan
    assert buffers <= 20 * parts + 20, plan


@pytest.fixture(scope="module")
def big_mariadb(django_db_setup, django_db_blocker):
    with django_db_blocker.unblock():
        execute(
            MARIADB,
            "CREATE TABLE big (id bigint AUTO_INCREMENT PRIMARY KEY, txid bigint NOT NULL, "
            "stream varchar(255), version bigint, type varchar(255), data longtext, slice int, "
            "KEY (txid, id)) STATS_AUTO_RECALC = 0",
        )
        # Of each 2,000 positions three are missing: one, and two that follow one another.
        execute(
            MARIADB,
            "INSERT INTO big SELECT seq, 0, concat('stream-', seq % 5000), seq DIV 5000, "
            f"'order.placed', '{DATA}', seq % 1024 FROM {numbers(1, ROWS, 'seq')} AS s "
            "WHERE seq % 2000 NOT IN (100, 200, 201)",
        )
        yield
        execute(MARIADB, "DROP TABLE big")
        connections[MARIADB].close()


class Counted(MysqlWindow):
    """Counts the rows that each statement touches."""

    def __init__(self) -> None:
        super().__init__("big", self.count, dirty=self.count)
        self.costs: list[tuple[int, str]] = []

    def count(self, sql, params):
        execute(MARIADB, "FLUSH STATUS")
        rows = run(MARIADB, sql, params)
        counters = execute(MARIADB, "SHOW SESSION STATUS LIKE 'Handler_read_%'")
        self.costs.append((sum(int(value) for _, value in counters), sql))
        return rows


def read_mariadb(state, *, most, **only):
    window = Counted()
    page = window.read(state, columns=COLUMNS, limit=LIMIT, only=EventFilter(**only))
    for touched, sql in window.costs:
        assert touched <= most, f"{touched} rows touched by {sql[:1000]}"
    return [row[0] for row in page.rows], page.state


def gaps(first, last):
    """What is missing there."""
    return [
        gap
        for i in range(first - first % 2000, last, 2000)
        for gap in ((i + 100, i + 100, None), (i + 200, i + 201, None))
    ]


@on("mariadb")
@pytest.mark.django_db
class TestMariadb:
    """The handler counts rows that it read, or looked for in vain."""

    @pytest.fixture(autouse=True, params=["stale", "fresh"])
    def statistics(self, request, alias, big_mariadb):
        if request.param == "fresh":
            execute(alias, "ANALYZE TABLE big")

    @pytest.mark.parametrize("high", [0, ROWS // 2, ROWS - 10, ROWS])
    def test_anywhere(self, high):
        ids, state = read_mariadb(MysqlState(high), most=LIMIT + 10)
        assert len(ids) == min(LIMIT, ROWS - high)
        assert state.high == (ids or [high])[-1]

    def test_with_much_in_flight(self):
        runs = gaps(0, ROWS)
        assert len(runs) == 1000
        ids, state = read_mariadb(MysqlState(ROWS - 10, runs), most=2 * len(runs) + 30)
        assert len(ids) == 10
        assert [each[:2] for each in state.missing] == [each[:2] for each in runs]

    def test_rows_that_come_late(self):
        """They are there now, each in a place of its own."""
        late = [(2000 * i + 300, 2000 * i + 301, None) for i in range(400)]
        ids, state = read_mariadb(MysqlState(ROWS - 10, late), most=2500)
        assert ids == [i for each in late for i in each[:2]][:LIMIT]
        ids, state = read_mariadb(state, most=2500)
        assert ids == [*[i for each in late for i in each[:2]][LIMIT:], *range(ROWS - 9, ROWS + 1)]

    def test_a_long_run_of_which_all_comes(self):
        ids, state = read_mariadb(MysqlState(ROWS, [(500_300, 501_900, None)]), most=LIMIT + 10)
        assert ids == list(range(500_300, 500_300 + LIMIT))
        assert state.missing[0][:2] == (500_800, 501_900)

    def test_where_little_is_wanted(self):
        ids, state = read_mariadb(MysqlState(0), most=LIMIT + 10, types=["none"])
        assert ids == []
        assert LIMIT <= state.high <= LIMIT + 10
        ids, _ = read_mariadb(MysqlState(0), most=32 * LIMIT + 100, parts=32, part=3)
        assert LIMIT - 50 < len(ids) < LIMIT + 50
