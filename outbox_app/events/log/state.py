"""States of cursors: what a reader has to remember to read a log exactly.

Each window has its own kind of state. In the table and in Spark's offsets, a state is JSON that
names its window. Imports no Django: Spark's executors use it.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, dataclass, fields
from math import isfinite
from typing import Any, ClassVar, Self, cast, get_type_hints

from ..exceptions import DamagedCursor

#: Lower than every transaction id: a snapshot with this ``xmax`` sees nothing.
NEVER = -(2**62)

#: Errors that reading an invalid state may raise.
_NONSENSE = (ValueError, LookupError, TypeError, AttributeError, RecursionError, DamagedCursor)

_SNAPSHOT = re.compile(r"(-?\d{1,20}):(-?\d{1,20}):((?:\d{1,20},)*\d{1,20})?", re.ASCII)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was committed at one moment, as ``pg_snapshot`` writes it: ``xmin:xmax:xip,xip…``."""

    #: The lowest transaction id that had not begun.
    xmax: int
    #: The transactions below ``xmax`` that were still running.
    running: frozenset[int]
    text: str

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """Read the text of a snapshot. Raises ``DamagedCursor``."""
        match = _SNAPSHOT.fullmatch(text) if isinstance(text, str) else None
        if match:
            xmin, xmax = int(match[1]), int(match[2])
            running = frozenset(map(int, match[3].split(","))) if match[3] else frozenset()
            if xmin <= xmax and all(xmin <= xid < xmax for xid in running):
                return cls(xmax, running, text)
        raise DamagedCursor(f"{text!r:.100} is no snapshot (xmin:xmax:xip,…).")

    def sees(self, txid: int) -> bool:
        """Return whether a transaction had ended, by commit or rollback."""
        return txid < self.xmax and txid not in self.running


#: In this snapshot nothing had been committed yet.
BEGINNING = f"{NEVER}:{NEVER}:"


class WindowState:
    """Base of all states."""

    #: Name of the window that understands this state.
    window: ClassVar[str]

    def dump(self) -> str:
        values = {"window": self.window, **asdict(cast(Any, self))}
        return json.dumps(values, separators=(",", ":"))

    @classmethod
    def load(cls, text: str) -> Self:
        """Read what ``dump`` wrote. Raises ``DamagedCursor``."""
        try:
            values = json.loads(text)
            if (made := values.pop("window")) != cls.window:
                raise ValueError(
                    f"it was made on {made!r:.50}, and this is {cls.window!r}. After a move to "
                    "another database engine replay it --from now"
                )
            return cls.of(values)
        except _NONSENSE as error:
            why = f"{type(error).__name__}: {error}"
            raise DamagedCursor(
                f"The cursor's state cannot be read: {why:.200}. Reset or replay the subscription; "
                f"nothing was delivered. The state: {text!r:.200}"
            ) from error

    @classmethod
    def of(cls, values: dict[str, Any]) -> Self:
        """Check the values and return their state. ``load`` turns all errors into one."""
        hints = get_type_hints(cls)
        for field in fields(cls):  # type: ignore[arg-type]
            value, kind = values[field.name], hints[field.name]
            if kind in (int, str) and type(value) is not kind:
                raise TypeError(f"{field.name} is {value!r:.100}")
            if kind is int and not 0 <= value < 2**63:
                raise ValueError(f"{field.name} is {value!r:.100}")
        state = cls(**values)
        state.check()
        return state

    def check(self) -> None:
        """Raise ``ValueError``, ``TypeError`` or ``DamagedCursor`` if the state is invalid."""


@dataclass(frozen=True, slots=True)
class PostgresState(WindowState):
    window: ClassVar[str] = "postgresql"

    #: ``system_identifier`` of the cluster that the transaction ids belong to.
    cluster: str
    #: Snapshot; the rows that it sees are consumed.
    lo: str
    #: Snapshot; the rows that it sees are due. Empty: no window is open.
    hi: str = ""
    #: Last position handled inside the open window.
    pos: int = 0
    #: First and last position of the open window, without rows of transactions running in ``lo``.
    first: int = 0
    last: int = 0
    #: The state from before the cluster changed, as a dictionary; its rows come first.
    rebased: Any = None

    @property
    def after(self) -> int:
        """The position before the rest of the window, except transactions running in ``lo``."""
        return max(self.pos, self.first - 1)

    def check(self) -> None:
        lo = Snapshot.parse(self.lo)
        if self.hi:
            hi = Snapshot.parse(self.hi)
            if hi.xmax < lo.xmax or any(lo.sees(x) for x in hi.running):
                raise ValueError("hi is no later than lo")
        if self.rebased is not None:
            if self.hi:
                raise ValueError("a window is open before what was rebased has been read")
            if PostgresState.of(self.rebased).rebased is not None:
                raise ValueError("it was rebased twice")


@dataclass(frozen=True, slots=True)
class MysqlState(WindowState):
    window: ClassVar[str] = "mysql"

    high: int = 0
    #: Runs ``[first, last, since]`` of missing positions, in order. ``since`` is the database's
    #: time, in seconds, since when dirty reads show no row of the run; None: the last one did.
    missing: Any = ()

    def __post_init__(self) -> None:
        # JSON returns lists. With tuples, a state is equal to the one that is loaded from its JSON.
        if not isinstance(self.missing, list | tuple):
            raise TypeError(f"missing is {self.missing!r:.100}")
        object.__setattr__(self, "missing", tuple(map(tuple, self.missing)))

    def check(self) -> None:
        before = 0
        for first, last, since in self.missing:
            if type(first) is not int or type(last) is not int:
                raise TypeError(f"the run {first!r:.30}-{last!r:.30} is invalid")
            if not before < first <= last <= self.high:
                raise ValueError(f"the run {first}-{last} is invalid")
            if since is not None and (type(since) not in (int, float) or not isfinite(since)):
                raise TypeError(f"the run {first}-{last} is missing since {since!r:.30}")
            before = last


@dataclass(frozen=True, slots=True)
class SqliteState(WindowState):
    window: ClassVar[str] = "sqlite"

    pos: int = 0


def is_whole_window(before: Any, after: Any) -> bool:
    """Return whether a page had all that was committed when it was read, on PostgreSQL.

    There the next page has events as long as others write, and a replay would never end.
    """
    return isinstance(before, PostgresState) and not (before.hi or after.hi)
