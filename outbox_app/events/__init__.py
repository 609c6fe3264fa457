"""How events (log, subscriptions, projections) show themselves to the core, and their retention."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..exports import lazy

if TYPE_CHECKING:
    from .log.newevent import ANY as ANY
    from .log.newevent import NO_STREAM as NO_STREAM
    from .log.newevent import NewEvent as NewEvent
    from .log.publish import publish as publish
    from .log.publish import publish_many as publish_many
    from .log.record import RecordedEvent as RecordedEvent
    from .mixin import PublishingMixin as PublishingMixin
    from .projections.projection import Projection as Projection
    from .retention import holds as holds
    from .retention import needed as needed
    from .retention import prune_events as prune_events
    from .subscriptions.subscriber import subscriber as subscriber
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            ".log.newevent": ["ANY", "NO_STREAM", "NewEvent"],
            ".log.publish": ["publish", "publish_many"],
            ".log.record": ["RecordedEvent"],
            ".mixin": ["PublishingMixin"],
            ".projections.projection": ["Projection"],
            ".retention": ["holds", "needed", "prune_events"],
            ".subscriptions.subscriber": ["subscriber"],
        },
    )
