"""What is kept for how long."""

from .rows import prune

__all__ = ["prune"]
