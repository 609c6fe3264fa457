"""The event log: the only place that reasons about order, ids, visibility and gaps."""

from .window import Window

__all__ = ["Window"]
