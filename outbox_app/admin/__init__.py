"""The outbox in Django's admin: jobs, drainers, events, subscriptions, statistics, an overview.

The pages need ``django.contrib.admin`` only. They are read-only except for peers and these actions:
requeue and discard dead jobs; cancel, release and move to dead staged jobs; confirm and cancel
prepared events; pause, resume and replay subscriptions, release parked streams, skip gaps; drain
servers. Entity types are registered when Django is ready: see ``entity``.
"""

from .dead import DeadJobAdmin
from .entity import EntityAdmin, VersionAdmin
from .event import EventAdmin
from .gap import GapAdmin
from .prepared import PeerAdmin, PreparedEventAdmin
from .process import (
    IncidentAdmin,
    OverviewAdmin,
    ProcessAdmin,
    ServerAdmin,
    StatisticAdmin,
    TaskResultAdmin,
)
from .staged import StagedJobAdmin
from .subscription import ParkedStreamAdmin, SubscriptionAdmin

__all__ = ["DeadJobAdmin", "EntityAdmin", "EventAdmin", "GapAdmin", "IncidentAdmin",
           "OverviewAdmin", "ParkedStreamAdmin", "PeerAdmin", "PreparedEventAdmin", "ProcessAdmin",
           "ServerAdmin", "StagedJobAdmin", "StatisticAdmin", "SubscriptionAdmin",
           "TaskResultAdmin", "VersionAdmin"]  # fmt: skip
