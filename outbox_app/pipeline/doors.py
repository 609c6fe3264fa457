"""What the pipeline adds to the core: nothing that is shown."""

from __future__ import annotations

from ..capability import Doors


class PipelineDoors(Doors):
    name = "pipeline"
    rank = 90


DOORS = PipelineDoors()
