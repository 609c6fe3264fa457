"""States of cursors: what a reader has to remember to read a log exactly.

Each window has a state of its own; in the table, and in Spark's offsets, it is JSON that names its
window. Imports no Django: Spark's executors use it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from typing import Any, ClassVar, Self, cast, get_type_hints

from ..exceptions import DamagedCursor

#: Below every transaction id: nothing is visible in it.
NEVER = -(2**62)


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What was committed at one moment, as ``pg_snapshot`` writes it: ``xmin:xmax:xip,xip…``."""

    #: Transactions from here on had not begun.
    xmax: int
    #: Those below that were still running.
    running: frozenset[int]
    text: str

    @classmethod
    def parse(cls, text: str) -> Snapshot:
        """Read the text of a snapshot.

        Raises:
            DamagedCursor: It is none.
        """
        try:
            _, xmax, running = text.split(":")
            numbers = frozenset(int(xid) for xid in running.split(",") if xid)
            return cls(int(xmax), numbers, text)
        except (ValueError, AttributeError) as error:
            raise DamagedCursor(f"{text!r} is no snapshot (xmin:xmax:xip,…).") from error

    def sees(self, txid: int) -> bool:
        """Say whether a transaction had committed, or rolled back."""
        return txid < self.xmax and txid not in self.running


#: In this snapshot nothing had been committed yet.
BEGINNING = f"{NEVER}:{NEVER}:"


class State:
    """Base of all states."""

    #: Of the window that understands it.
    window: ClassVar[str]

    def dump(self) -> str:
        """Return the state as JSON."""
        values = {"window": self.window, **asdict(cast(Any, self))}
        return json.dumps(values, separators=(",", ":"))

    @classmethod
    def load(cls, text: str) -> Self:
        """Read what ``dump`` wrote.

        Raises:
            DamagedCursor: It is something else.
        """
        try:
            values = json.loads(text)
            if values.pop("window") != cls.window:
                raise ValueError("it belongs to another kind of window")
            hints = get_type_hints(cls)
            for field in fields(cls):  # type: ignore[arg-type]
                value = values[field.name]
                kind = hints[field.name]
                if kind in (int, str) and type(value) is not kind:
                    raise TypeError(f"{field.name} is {value!r}")
            state = cls(**values)
            state.check()
        except (ValueError, KeyError, TypeError, AttributeError, DamagedCursor) as error:
            raise DamagedCursor(
                f"The cursor's state {text[:200]!r} cannot be read: {error!r}. Reset or replay the "
                "subscription; nothing was delivered."
            ) from error
        return state

    def check(self) -> None:
        """Raise ``ValueError``, ``TypeError`` or ``DamagedCursor`` where it makes no sense."""


@dataclass(frozen=True, slots=True)
class PostgresState(State):
    """Between two snapshots, and where in between."""

    window: ClassVar[str] = "postgresql"

    #: ``system_identifier`` of the cluster that the transaction ids belong to.
    cluster: str
    #: What is visible here is consumed.
    lo: str
    #: What is visible here is due. Empty: no window is open.
    hi: str = ""
    #: Last position handled inside the open window.
    pos: int = 0
    #: Positions between which the open window's rows lie, but for those of ``lo``'s running ones.
    first: int = 0
    last: int = 0
    #: Another such state, from before the cluster changed; its rows come first.
    rebased: Any = None

    def check(self) -> None:
        """Both snapshots must be some."""
        Snapshot.parse(self.lo)
        if self.hi:
            Snapshot.parse(self.hi)
        if self.rebased is not None:
            PostgresState(**self.rebased).check()


@dataclass(frozen=True, slots=True)
class MysqlState(State):
    """The highest position seen, and what was missing below it."""

    window: ClassVar[str] = "mysql"

    high: int = 0
    #: Runs ``[first, last, since]`` of positions that were not there, in order; ``since`` is the
    #: database's time, in seconds, from which on nothing was seen of the run; None: it was seen.
    missing: Any = ()

    def check(self) -> None:
        """Runs must be runs, in order, below the highest position."""
        before = 0
        for first, last, since in self.missing:
            if not before < first <= last <= self.high or not isinstance(since, float | int | None):
                raise ValueError(f"the run {first}-{last} makes no sense")
            before = last


@dataclass(frozen=True, slots=True)
class SqliteState(State):
    """The last position seen: commit order is position order."""

    window: ClassVar[str] = "sqlite"

    pos: int = 0
