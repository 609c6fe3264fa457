"""Jobs: staged in the transaction of the caller, drained to the broker, decided on when dead."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..exports import lazy

if TYPE_CHECKING:
    from .bulk import BulkResult as BulkResult
    from .dead import discard_dead as discard_dead
    from .dead import requeue_dead as requeue_dead
    from .drain.drain import Drain as Drain
    from .drain.drain import DrainStats as DrainStats
    from .drain.run import drain_outbox as drain_outbox
    from .drain.status import backlog as backlog
    from .drain.status import drainers as drainers
    from .drain.status import held as held
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            ".bulk": ["BulkResult"],
            ".dead": ["discard_dead", "requeue_dead"],
            ".drain.drain": ["Drain", "DrainStats"],
            ".drain.run": ["drain_outbox"],
            ".drain.status": ["backlog", "drainers", "held"],
        },
    )
