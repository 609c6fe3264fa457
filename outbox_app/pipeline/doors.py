"""What the pipeline adds to the core: the names of its statistics.

The list of statistics in the admin offers these names as a filter. Neither this module nor the
names need Spark.
"""

from __future__ import annotations

from ..capability import Doors
from .statistic_names import NAMES


class PipelineDoors(Doors):
    name = "pipeline"
    rank = 90
    statistics = NAMES


DOORS = PipelineDoors()
