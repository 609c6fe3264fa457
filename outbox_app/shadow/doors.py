"""What shadow mode adds to the core: a drainer compares its records while it drains."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..capability import Doors
from ..process.lease import LeaseHolder
from .comparison import ShadowComparison


class ShadowDoors(Doors):
    name = "shadow"
    rank = 80

    def chores(self, holder: LeaseHolder) -> Iterable[Callable[[], None]]:
        return [ShadowComparison(holder).keep]


DOORS = ShadowDoors()
