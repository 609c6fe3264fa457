"""What the pipeline adds to the core: the names of its statistics."""

from __future__ import annotations

from ..capability import Doors
from .statistic_names import NAMES


class PipelineDoors(Doors):
    name = "pipeline"
    statistics = NAMES


DOORS = PipelineDoors()
