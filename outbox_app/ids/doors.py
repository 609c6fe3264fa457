"""What ids add to the core: nothing that is shown."""

from __future__ import annotations

from ..capability import Doors
from .conf import IdSettings


class IdsDoors(Doors):
    name = "ids"
    rank = 60
    settings = IdSettings


DOORS = IdsDoors()
