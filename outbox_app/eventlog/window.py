"""The contract of a window: reading one log of one database exactly.

``read`` takes a state and returns the rows that come next, with the state after them. A window
keeps no state itself: until the next one is stored, the same state gives the same rows again, in
the same order, after any crash (on MySQL and SQLite with those that were committed meanwhile, on
MySQL in between). Every committed row comes once; no row comes before it is committed; rows of one
stream come in the order of their versions, and if b's writer could see a, a comes before b. What
would break this is refused with a ``ReadRefused``. One suite holds every window to it
(tests/eventlog/conformance.py). Imports no Django: Spark's executors use it.
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

#: A page passes at most about so many positions, also where a filter drops most of them.
MAX_POSITIONS = 100_000

#: Rows that seal a position at which there will never be an event.
TOMBSTONE = "$tombstone"


@dataclass(frozen=True, slots=True)
class Page(Generic[S]):
    #: In the order in which they are to be handled, with the columns that were asked for.
    rows: list[tuple[Any, ...]]
    state: S
    #: Whether there may be more at once.
    more: bool
    #: Highest position that was passed, 0: none was.
    position: int = 0


class Window(ABC, Generic[S]):
    """Reads one log over one connection.

    Args:
        table: The log's table.
        run: Runs statements. No transaction may be open.
        dirty: The same on a connection at READ UNCOMMITTED, where ``needs_dirty``.
        settle: Seconds after which a missing position of which nothing was seen was never used.
        tombstones: Seal such positions.
    """

    state: type[S]
    needs_dirty = False
    quote = '"'
    #: Gives the columns that the log has of its own, for one tombstone.
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
        #: The table as SQL writes it.
        self.source = f"{self.quote}{table}{self.quote}"
        self.run = run
        self.dirty = dirty
        self.settle = settle
        self.tombstones = tombstones

    def top(self) -> int:
        """Return the highest position that is there, 0: none is."""
        [(top,)] = self.run(f"SELECT COALESCE(MAX(id), 0) FROM {self.source}", [])
        return int(top)

    @abstractmethod
    def start(self, after: int | None = None) -> S:
        """Return the state of a new reader. Raises ``ReadRefused``.

        Of what has been committed by now positions up to ``after`` are skipped; 0: none, by default
        all. What is in flight comes when it commits.
        """

    def move(self, after: int | None, states: Sequence[S]) -> S:
        """Return the state of readers that move from these states: as ``start()``."""
        return self.start(after)

    @abstractmethod
    def read(self, state: S, *, columns: Sequence[str], limit: int, only: EventFilter) -> Page[S]:
        """Return at most about ``limit`` rows that come next; a page without any may have more.

        Raises ``ReadRefused`` where the log cannot be read exactly, or not from this state.
        """

    @abstractmethod
    def unread(self, state: S) -> str:
        """Return an SQL condition, without parameters: the row has not been passed by the state.

        It uses indexes where few rows have not.
        """

    @abstractmethod
    def verify(self, state: S) -> None:
        """Check that the state belongs to this database as it is now.

        Raises ``ReadRefused`` where it does not, or this server cannot be read from exactly.
        """

    def reached(self, state: S) -> int | None:
        """Return the position up to which a state relies on positions never being used again.

        None: it does not, as on PostgreSQL, where rows are known by their transactions.
        """
        return None

    def rebase(self, state: S, last: int | None = None) -> S:
        """Return the state with which a reader continues in a database that was restored.

        ``last`` is the highest position from before; by default what has been given out by now.
        Raises ``ReadRefused`` where it is not known what the state has passed.
        """
        return state
