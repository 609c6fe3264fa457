"""What the door adds to the core: its settings."""

from __future__ import annotations

from ..capability import Doors
from .conf import DoorSettings


class DoorDoors(Doors):
    name = "door"
    rank = 40
    settings = DoorSettings


DOORS = DoorDoors()
