"""What is kept for how long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..exports import lazy

if TYPE_CHECKING:
    from .events import holds as holds
    from .events import needed as needed
    from .events import prune_events as prune_events
    from .prune import prune_inbox as prune_inbox
    from .prune import prune_incidents as prune_incidents

if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            ".events": ["holds", "needed", "prune_events"],
            ".prune": ["prune_inbox", "prune_incidents"],
        },
    )
