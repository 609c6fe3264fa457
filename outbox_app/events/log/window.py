"""The contract of a window: reading one log of one database exactly.

``read`` takes a state and returns the next rows, with the state after them. A window keeps no state
itself: until the next state is stored, the same state gives the same rows again, in the same order,
after any crash. (MySQL and SQLite add rows committed meanwhile; MySQL adds them in between.) Every
committed row comes once, and no row comes before it is committed. Rows of one stream come in the
order of their versions, and if b's writer could see a, a comes before b. Reading that would break
this raises ``ReadRefused``. One suite tests every window (tests/events/log/conformance.py). Imports
no Django: Spark's executors use it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from .filter import EventFilter
from .state import WindowState

#: Runs a statement in autocommit, with ``%s`` parameters, and returns its rows.
Run = Callable[[str, Sequence[Any]], list[tuple[Any, ...]]]

S = TypeVar("S", bound=WindowState)

#: A page passes about so many positions at most, even if a filter drops most of their rows.
MAX_POSITIONS = 100_000

#: Type of the rows that seal positions at which there will never be an event.
TOMBSTONE = "$tombstone"


@dataclass(frozen=True, slots=True)
class Page(Generic[S]):
    #: The rows, in the order in which to handle them, with the columns that were asked for.
    rows: list[tuple[Any, ...]]
    state: S
    #: Whether more rows may follow right away.
    more: bool
    #: Highest position that the page passed; 0 if it passed none.
    position: int = 0


class Window(ABC, Generic[S]):
    """Reads one log over one connection.

    Args:
        table: The log's table.
        run: Runs statements. No transaction may be open.
        dirty: Runs statements on a connection at READ UNCOMMITTED, if ``needs_dirty``.
        settle: Seconds after which a missing position that shows no row counts as never used.
        tombstones: Whether to seal such positions with rows.
    """

    state: type[S]
    needs_dirty = False
    quote = '"'
    #: Returns the values of the log's own columns for one tombstone.
    own_values: Callable[[], dict[str, Any]] = dict

    def __init__(
        self,
        table: str,
        run: Run,
        *,
        dirty: Run | None = None,
        settle: float = 5.0,
        tombstones: bool = False,
    ) -> None:
        self.table = table
        #: The table's name, quoted for SQL.
        self.source = f"{self.quote}{table}{self.quote}"
        self.run = run
        self.dirty = dirty
        self.settle = settle
        self.tombstones = tombstones

    def top(self) -> int:
        """Return the highest position in the table; 0 if the table is empty."""
        [(top,)] = self.run(f"SELECT COALESCE(MAX(id), 0) FROM {self.source}", [])
        return int(top)

    @abstractmethod
    def start(self, after: int | None = None) -> S:
        """Return the state of a new reader. Raises ``ReadRefused``.

        The reader skips rows that are committed now: those up to position ``after`` (0: none), by
        default all. Rows in flight come when they commit.
        """

    def move(self, after: int | None, states: Sequence[S]) -> S:
        """Return, as ``start()`` does, the state of a reader that moves from these states."""
        return self.start(after)

    @abstractmethod
    def read(self, state: S, *, columns: Sequence[str], limit: int, only: EventFilter) -> Page[S]:
        """Return the next rows, about ``limit`` at most. More may follow even an empty page.

        Raises ``ReadRefused`` if the log cannot be read exactly, or not from this state.
        """

    @abstractmethod
    def unread(self, state: S) -> str:
        """Return an SQL condition, without parameters, for rows that the state has not passed.

        The condition uses indexes if such rows are few.
        """

    @abstractmethod
    def verify(self, state: S) -> None:
        """Check that the state belongs to this database as it is now.

        Raises ``ReadRefused`` if it does not, or if the log cannot be read exactly on this server.
        """

    def reached(self, state: S) -> int | None:
        """Return the position up to which a state relies on positions never being used again.

        None if it does not, as on PostgreSQL, where rows are identified by their transactions.
        """
        return None

    def rebase(self, state: S, last: int | None = None) -> S:
        """Return the state with which a reader continues in a database that was restored.

        ``last`` is the highest position from before; by default the highest given out by now.
        Raises ``ReadRefused`` if it is unknown which rows the state has passed.
        """
        return state
