"""How events (log, subscriptions, projections) show themselves to the core, and their retention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..exports import lazy

if TYPE_CHECKING:
    from .mixin import PublishingMixin as PublishingMixin
    from .retention import holds as holds
    from .retention import needed as needed
    from .retention import prune_events as prune_events
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__, {".mixin": ["PublishingMixin"], ".retention": ["holds", "needed", "prune_events"]}
    )
