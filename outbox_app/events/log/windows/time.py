"""Reads by time where no exact window is possible: from a replica, or from an imported log.

Rows come in the order of ``(recorded_at, id)``, up to a second ago by the database's clock. **Rows
that commit later than that are passed over**: on its own, this reader loses rows. The completeness
check (``completeness``) brings a late row back once a later event of its stream is read;
it cannot see a late event that is the last of its stream. The log needs an index on
``(recorded_at, id)``. Imports no Django.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar
from uuid import uuid4

from ..filter import EventFilter
from ..state import WindowState
from ..window import Page, Window

#: Above every position.
TOP = 2**63 - 1

_TIME = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d{1,6})?(\+00)?)?", re.ASCII)


@dataclass(frozen=True, slots=True)
class TimeState(WindowState):
    """The last row read, by time and position. Times are texts of the database, or empty."""

    window: ClassVar[str] = "time"

    at: str = ""
    id: int = 0
    #: Upper bound of the next page; empty: a second ago.
    until: str = ""
    #: Where the reader began. Rows up to here count as handled.
    since_at: str = ""
    since_id: int = 0
    #: An id made when the reader began: versions recorded under another one are ignored.
    run: str = ""

    def check(self) -> None:
        """Raise ``ValueError`` if a time has another form: times are written into SQL."""
        for text in (self.at, self.until, self.since_at):
            if not _TIME.fullmatch(text):
                raise ValueError(f"{text!r:.100} is no time")

    @property
    def floor(self) -> TimeState:
        """The state in which the reader began: every row before it counts as handled."""
        return TimeState(self.since_at, self.since_id)


class TimeWindow(Window[TimeState]):
    """Reads by time. The subclasses hold what differs between databases."""

    state = TimeState
    #: Rows younger than this are left for later, in seconds.
    behind: ClassVar[float] = 1.0
    #: SQL of a time as text, with all of its digits.
    text: ClassVar[str]
    #: SQL of the moment ``behind`` seconds ago, of a type that compares with ``recorded_at``.
    bound: ClassVar[str]
    #: SQL condition for the rows after a time and position.
    after: ClassVar[str] = "((recorded_at, id) > ('{at}', {id}))"

    def start(self, after: int | None = None) -> TimeState:
        """``after`` stands for the time of the row at that position, or of the one before it."""
        run = uuid4().hex
        if after is None:
            [(at,)] = self.run(f"SELECT {self.text.format(self._bound())}", [])
            id = TOP
        else:
            times = f"SELECT {self.text.format('recorded_at')} FROM {self.source}"
            rows = self.run(f"{times} WHERE id <= {after} ORDER BY id DESC LIMIT 1", [])
            at, id = (rows[0][0], after) if rows else ("", 0)
        return TimeState(at, id, since_at=at, since_id=id, run=run)

    def read(
        self, state: TimeState, *, columns: Sequence[str], limit: int, only: EventFilter
    ) -> Page[TimeState]:
        """Return a page.

        After a full page, the next pages end at its largest time until one is not full: rows with
        the same time, as one transaction writes them, are all read before later rows.
        """
        condition, params = only.sql()
        # With a condition, pass the rows that it leaves out, too, or they would be read for ever.
        # Pass up to the last row, not to a time: a replica that is behind may get rows before it.
        newest = self._newest() if condition and not state.until else ("", 0)
        bound = f"'{state.until}'" if state.until else self._bound()
        rows = self.run(
            f"SELECT {self.text.format('recorded_at')} AS at_text, id AS position, "
            f"{', '.join(columns)} FROM {self.source} WHERE {self.unread(state)} "
            f"AND recorded_at <= {bound} "
            f"{condition and f'AND {condition}'} ORDER BY recorded_at, id LIMIT {limit}",
            params,
        )
        full = len(rows) == limit
        at, id = (rows[-1][0], rows[-1][1]) if rows else (state.at, state.id)
        if not full:
            at, id = max((at, id), newest)
        after = replace(state, at=at, id=id, until=at if full else "")
        return Page(
            [row[2:] for row in rows],
            after,
            more=full or bool(state.until),
            position=max((row[1] for row in rows), default=0),
        )

    def unread(self, state: TimeState) -> str:
        """A row that committed late counts as passed, although it was not read."""
        return self.after.format(at=state.at, id=state.id) if state.at else "(1 = 1)"

    def verify(self, state: TimeState) -> None:
        """Accept any state: a time of this database looks like that of any other."""

    def _newest(self) -> tuple[str, int]:
        """Return time and position of the last row that may be read; empty and 0 if none may."""
        rows = self.run(
            f"SELECT {self.text.format('recorded_at')}, id FROM {self.source} "
            f"WHERE recorded_at <= {self._bound()} ORDER BY recorded_at DESC, id DESC LIMIT 1",
            [],
        )
        return (rows[0][0], rows[0][1]) if rows else ("", 0)

    def _bound(self) -> str:
        return self.bound.format(self.behind)


class PostgresTimeWindow(TimeWindow):
    """On PostgreSQL, a standby included. Texts are in UTC, and say so: in a session's zone an hour
    may occur twice, and the next session may have another zone."""

    text = """to_char({} AT TIME ZONE 'UTC', 'YYYY-MM-DD HH24:MI:SS.US"+00"')"""
    bound = "(statement_timestamp() - interval '{} seconds')"


class MysqlTimeWindow(TimeWindow):
    """On MySQL and MariaDB, a replica included. Times are in UTC, as Django stores them."""

    quote = "`"
    text = "DATE_FORMAT({}, '%%Y-%%m-%%d %%H:%%i:%%s.%%f')"
    bound = "(UTC_TIMESTAMP(6) - INTERVAL {} SECOND)"
    # Two ranges, because the server uses no index for a row comparison.
    after = "(recorded_at > '{at}' OR (recorded_at = '{at}' AND id > {id}))"


class MysqlLocalTimeWindow(MysqlTimeWindow):
    """The same where ``USE_TZ`` is off: times are in the zone of the server's sessions."""

    bound = "(CURRENT_TIMESTAMP(6) - INTERVAL {} SECOND)"


class SqliteTimeWindow(TimeWindow):
    """On SQLite. Times are texts there already."""

    text = "{} || ''"
    bound = "strftime('%%Y-%%m-%%d %%H:%%M:%%f', 'now', '-{} seconds')"


def time_window(vendor: str, *, local: bool) -> type[TimeWindow]:
    """Return the window of a database. ``local``: ``USE_TZ`` is off."""
    if vendor == "mysql" and local:
        return MysqlLocalTimeWindow
    windows = {"postgresql": PostgresTimeWindow, "mysql": MysqlTimeWindow}
    return windows.get(vendor, SqliteTimeWindow)
