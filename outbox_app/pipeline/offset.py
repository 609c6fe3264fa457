"""Offsets: the form of a log's cursor in Spark's checkpoints and in archives.

An offset names its log and its database, and one row that was committed when it was made. A
checkpoint of another log or database, or of a database that was restored or set back to an earlier
time, is refused before anything is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ..events.exceptions import DamagedCursor, ForeignCursor, UnknownLog
from ..events.log.scan import LogScan
from ..events.log.state import WindowState
from .database import Database

#: The version of the format. Offsets of another version are refused.
VERSION = 1

_EXPECTED = "A checkpoint must belong to this log and this database: use another folder for it."


@dataclass(frozen=True, slots=True)
class Offset:
    log: str
    #: See ``Database.identity``.
    database: str
    #: Position and message id of a row that was committed when the offset was made; 0 if none was.
    position: int
    message_id: str
    #: The cursor, as ``events.log.state`` writes it.
    state: str
    version: int = VERSION

    def dump(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def text(self) -> str:
        """The offset as JSON, for options and commits."""
        return json.dumps(self.dump())

    @classmethod
    def load(cls, stored: Mapping[str, Any] | str) -> Offset:
        """Return an offset from the result of ``dump``, or its JSON. Raises ``DamagedCursor``."""
        try:
            values = dict(json.loads(stored) if isinstance(stored, str) else stored)
            if values.get("version", VERSION) != VERSION:
                raise DamagedCursor(
                    f"The offset has version {values['version']!r:.20}; this release reads version "
                    f"{VERSION}. Read it with the release that wrote the offset, or a later one."
                )
            offset = cls(**values)
            kinds = {"position": int, "version": int}
            for name, value in values.items():
                if type(value) is not kinds.get(name, str):
                    raise TypeError(f"{name} is {value!r:.100}")
        except (TypeError, ValueError, RecursionError) as error:
            raise DamagedCursor(
                f"{stored!r:.200} is no offset of a log ({error!r:.200}). {_EXPECTED}"
            ) from error
        return offset


class Offsets(LogScan[Offset]):
    """Scans one log from offset to offset. Raises ``UnknownLog`` if there is no such table."""

    def __init__(self, database: Database) -> None:
        options = database.options
        if not database.columns(options.log):
            raise UnknownLog(
                f"There is no table {options.log!r} in {options.url}. The option log must name the "
                "table of a log (default: outbox_event)."
            )
        self.database = database
        self.scan = database.log()

    def beginning(self) -> Offset:
        return self._of(self.scan.beginning(), (0, ""))  # nothing was read, so no row is named

    def latest(self) -> Offset:
        return self._of(self.scan.latest(), self._newest())

    def end(self, state: Offset, limit: int | None = None, bound: Offset | None = None) -> Offset:
        start = self.state(state)
        # Read before the end, which flushes to the server's disk what was committed by then.
        newest = self._newest()
        end = self.scan.end(start, limit, self.state(bound) if bound else None)
        return state if end == start else self._of(end, newest)

    def parts(self, start: Offset, end: Offset, count: int) -> list[list[str]]:
        parts: list[list[str]] = self.scan.parts(self.state(start), self.state(end), count)
        return parts

    def count(self, start: Offset, end: Offset) -> int:
        """Return how many rows the database counts between two offsets."""
        sql = f"SELECT COUNT(*) FROM {self.scan.source} WHERE"
        whole = self.parts(start, end, 1)
        return sum(self.database.run(f"{sql} {each}")[0][0] for part in whole for each in part)

    def lowest(self, ranges: Iterable[Iterable[str]]) -> int:
        """Return the lowest position in ranges; 0 if they are empty."""
        select = f"SELECT min(id + 0) FROM {self.scan.source} WHERE"
        found = [self.database.run(f"{select} {each}")[0][0] for r in ranges for each in r]
        return min((int(position) for position in found if position is not None), default=0)

    def verify(self, offset: Offset) -> None:
        state = self.state(offset)
        self.scan.verify(state)
        if not offset.position:
            return
        source = self.scan.source
        named = self.database.column("message_id")
        here = f"SELECT {named} FROM {source} WHERE id = {offset.position}"
        # If the row was pruned, so was everything before it, except rows that came later.
        before = f"id < {offset.position} AND NOT {self.scan.unread(state)}"
        before = f"SELECT 1 FROM {source} WHERE {before} LIMIT 1"
        found = self.database.run(here) or self.database.run(before)
        if found and _hex(found[0][0]) != _hex(offset.message_id):
            raise ForeignCursor(
                f"The offset names event {offset.message_id} at position {offset.position} of "
                f"{offset.log}, but that event is not there: this is another database, or it was "
                f"restored to an earlier time. {_EXPECTED}"
            )

    def state(self, offset: Offset) -> WindowState:
        """Return the cursor of an offset. Raises ``ReadRefused``."""
        identity = self.database.identity()
        if offset.log != self.database.options.log:
            raise ForeignCursor(
                f"The offset belongs to the log {offset.log}, not to {self.database.options.log}. "
                f"{_EXPECTED}"
            )
        if offset.database != identity:
            raise ForeignCursor(
                f"The offset was made in database {offset.database}; this is {identity}: another "
                f"database, or one that was restored from a dump. {_EXPECTED}"
            )
        state: WindowState = self.scan.state.load(offset.state)
        return state

    def _newest(self) -> tuple[int, str]:
        named = self.database.column("message_id")
        newest = f"SELECT id, {named} FROM {self.scan.source} ORDER BY id DESC LIMIT 1"
        [(position, message_id)] = self.database.run(newest) or [(0, "")]
        return int(position), str(message_id)

    def _of(self, state: WindowState, newest: tuple[int, str]) -> Offset:
        return Offset(self.database.options.log, self.database.identity(), *newest, state.dump())


def _hex(message_id: Any) -> str:
    return str(message_id).replace("-", "")
