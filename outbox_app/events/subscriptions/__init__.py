"""Subscriptions: who reads a log, how far, and what people decide about obstacles."""

from .counting import count_events
from .rebase import rebase_outbox
from .skips import discard_stream, skip_event, skip_gap

__all__ = [
    "count_events",
    "discard_stream",
    "rebase_outbox",
    "skip_event",
    "skip_gap",
]
