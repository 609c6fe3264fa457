"""Subscriptions: who reads a log, how far, and what is decided about what holds it up."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..exports import lazy

if TYPE_CHECKING:
    from .counting import count_events as count_events
    from .rebase import rebase_outbox as rebase_outbox
    from .skips import discard_stream as discard_stream
    from .skips import list_gaps as list_gaps
    from .skips import skip_event as skip_event
    from .skips import skip_gap as skip_gap

if not TYPE_CHECKING:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            ".counting": ["count_events"],
            ".rebase": ["rebase_outbox"],
            ".skips": ["discard_stream", "list_gaps", "skip_event", "skip_gap"],
        },
    )
