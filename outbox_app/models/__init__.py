"""Re-exports all models of the app: Django imports this package and nothing below it."""

from .clock import DatabaseNow
from .entity import CommandsOnly, EntityRow, EntityVersion, PrunedCommand
from .event import Event, EventLog, StreamHead
from .fleet import Node, Peer, Server
from .gap import Gap, GapQuerySet
from .job import (
    DeadJob,
    InboxEntry,
    Incident,
    ShadowJob,
    ShadowNote,
    ShadowResult,
    StagedJob,
    TaskResult,
)
from .prepared import Fence, PreparedEvent
from .process import Lease, Overview, Process
from .statistic import Statistic
from .subscription import Cursor, DeliveredVersion, ParkedStream, Subscription
from .transaction import CurrentTransaction

# Without it ``import *`` would hide Django's ``transaction`` by the module of this name.
__all__ = [
    "CommandsOnly", "CurrentTransaction", "Cursor", "DatabaseNow", "DeadJob",
    "DeliveredVersion", "EntityRow", "EntityVersion", "Event", "EventLog", "Fence", "Gap",
    "GapQuerySet", "InboxEntry", "Incident", "Lease", "Node", "Overview", "ParkedStream",
    "Peer", "PreparedEvent", "Process", "PrunedCommand", "Server", "ShadowJob", "ShadowNote",
    "ShadowResult", "StagedJob", "Statistic", "StreamHead", "Subscription", "TaskResult",
]  # fmt: skip
