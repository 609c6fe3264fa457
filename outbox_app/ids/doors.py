"""What ids add to the core: nothing that is shown."""

from __future__ import annotations

from ..capability import Doors


class IdsDoors(Doors):
    name = "ids"
    rank = 60


DOORS = IdsDoors()
