"""What is kept for how long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..exports import lazy

if TYPE_CHECKING:
    from ..operations.event_retention import holds as holds
    from ..operations.event_retention import needed as needed
    from ..operations.event_retention import prune_events as prune_events
    from ..operations.retention import prune_inbox as prune_inbox
    from ..operations.retention import prune_incidents as prune_incidents

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "holds": "outbox_app.operations.event_retention",
        "needed": "outbox_app.operations.event_retention",
        "prune_events": "outbox_app.operations.event_retention",
        "prune_inbox": "outbox_app.operations.retention",
        "prune_incidents": "outbox_app.operations.retention",
    },
)
