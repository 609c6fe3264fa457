"""The contract of a scan: the rows between two states of a window, for several readers at once.

Other processes read the ``parts``, at any time and as often as they must: the rows between two
states are the same every time (on MySQL, provided that each missing position that was given up was
really never used). One suite tests every scan (tests/events/log/test_scans.py). Imports no Django:
Spark's executors use it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from itertools import chain, pairwise, zip_longest
from typing import Generic, TypeVar

#: A state of a window, or something that holds one.
S = TypeVar("S")

#: The fewest positions of one part: fewer are not worth a reader of their own.
MIN_POSITIONS = 1_000


class LogScan(ABC, Generic[S]):
    """The methods that a window needs for several readers at once."""

    @abstractmethod
    def beginning(self) -> S:
        """Return the state before the first row."""

    @abstractmethod
    def latest(self) -> S:
        """Return a state of all that is committed now: a bound, from which nothing can be read."""

    @abstractmethod
    def end(self, state: S, limit: int | None = None, bound: S | None = None) -> S:
        """Return the state after the next rows, or the same state if there are none.

        These are about ``limit`` rows, by default all, and none beyond ``bound`` (from ``latest``).
        """

    @abstractmethod
    def parts(self, start: S, end: S, count: int) -> list[list[str]]:
        """Return at most ``count`` parts, which together are the rows between two states.

        A part is a list of SQL conditions without parameters; no row meets two of them. ``end`` is
        a state that the method ``end`` returned for ``start`` or for a later state.
        """


def ranges(after: int, upto: int, count: int) -> list[tuple[int, int]]:
    """Cut positions ``after + 1 … upto`` into at most ``count`` ranges ``(after, upto]``."""
    width = upto - after
    if width <= 0:
        return []
    count = max(1, min(count, width // MIN_POSITIONS))
    return list(pairwise(after + width * n // count for n in range(count + 1)))


def dealt(*lists: list[list[str]]) -> list[list[str]]:
    """Put the first parts of several lists together, then their second ones, and so on."""
    return [list(chain(*parts)) for parts in zip_longest(*lists, fillvalue=())]
