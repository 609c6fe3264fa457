"""What is kept for how long."""

from .events import holds, needed, prune_events
from .prune import prune_inbox, prune_incidents

__all__ = ["holds", "needed", "prune_events", "prune_inbox", "prune_incidents"]
