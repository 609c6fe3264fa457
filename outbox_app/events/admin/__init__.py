"""Events, gaps and subscriptions in the admin."""

from .event import EventAdmin
from .gap import GapAdmin
from .subscription import ParkedStreamAdmin, SubscriptionAdmin

__all__ = ["EventAdmin", "GapAdmin", "ParkedStreamAdmin", "SubscriptionAdmin"]
