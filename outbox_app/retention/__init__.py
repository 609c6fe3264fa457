"""What is kept for how long."""

from .events import holds, needed, prune_events
from .rows import prune

__all__ = ["holds", "needed", "prune", "prune_events"]
