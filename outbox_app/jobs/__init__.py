"""Jobs: staged in the transaction of the caller, drained to the broker, decided on when dead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..exports import lazy

if TYPE_CHECKING:
    from ..delivery.drain import Drain as Drain
    from ..delivery.drain import DrainStats as DrainStats
    from ..operations.dead import discard_dead as discard_dead
    from ..operations.dead import find_dead as find_dead
    from ..operations.dead import requeue_dead as requeue_dead
    from ..operations.drainers import drain_outbox as drain_outbox
    from ..operations.status import backlog as backlog
    from ..operations.status import drainers as drainers
    from ..operations.status import held as held

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "Drain": "outbox_app.delivery.drain",
        "DrainStats": "outbox_app.delivery.drain",
        "backlog": "outbox_app.operations.status",
        "discard_dead": "outbox_app.operations.dead",
        "drain_outbox": "outbox_app.operations.drainers",
        "drainers": "outbox_app.operations.status",
        "find_dead": "outbox_app.operations.dead",
        "held": "outbox_app.operations.status",
        "requeue_dead": "outbox_app.operations.dead",
    },
)
