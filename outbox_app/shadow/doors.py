"""What shadow mode adds to the core: a drainer compares its records while it drains."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..capability import Doors, is_on
from ..process.lease import LeaseHolder
from . import producer
from .comparison import ShadowComparison
from .models import ShadowJob


class ShadowDoors(Doors):
    name = "shadow"
    rank = 80
    recorder = producer

    def chores(self, holder: LeaseHolder) -> Iterable[Callable[[], None]]:
        return [ShadowComparison(holder).keep] if is_on(holder.using, ShadowJob) else []


DOORS = ShadowDoors()
