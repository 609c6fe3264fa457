"""Subscriptions: who reads a log, how far, and what is decided about what holds it up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..exports import lazy

if TYPE_CHECKING:
    from ..operations.counting import count_events as count_events
    from ..operations.gaps import list_gaps as list_gaps
    from ..operations.gaps import skip_gap as skip_gap
    from ..operations.rebase import rebase_outbox as rebase_outbox
    from ..operations.skips import discard_stream as discard_stream
    from ..operations.skips import skip_event as skip_event

__getattr__, __dir__, __all__ = lazy(
    __name__,
    {
        "count_events": "outbox_app.operations.counting",
        "discard_stream": "outbox_app.operations.skips",
        "list_gaps": "outbox_app.operations.gaps",
        "rebase_outbox": "outbox_app.operations.rebase",
        "skip_event": "outbox_app.operations.skips",
        "skip_gap": "outbox_app.operations.gaps",
    },
)
