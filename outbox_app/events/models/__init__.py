"""The log, its gaps, and the subscriptions that read it."""

from .event import Event, EventLog, StreamHead
from .gap import Gap, GapQuerySet
from .subscription import Cursor, DeliveredVersion, ParkedStream, Subscription
from .transaction import CurrentTransaction

# Without it ``import *`` would hide Django's ``transaction`` by the module of this name.
__all__ = [
    "CurrentTransaction", "Cursor", "DeliveredVersion", "Event", "EventLog", "Gap", "GapQuerySet",
    "ParkedStream", "StreamHead", "Subscription",
]  # fmt: skip
