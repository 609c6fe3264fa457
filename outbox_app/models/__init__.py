"""All models of the app, re-exported: Django looks for them here and nowhere below."""

from .clock import DatabaseNow
from .collation import compare_bytes
from .entity import CommandsOnly, EntityRow, EntityVersion
from .event import Event, EventLog, StreamHead
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
from .node import Node
from .peer import Peer
from .prepared import Fence, PreparedEvent
from .process import Lease, Overview, Process
from .server import Server
from .statistic import Statistic
from .subscription import Cursor, DeliveredVersion, ParkedStream, Subscription
from .transaction import CurrentTransaction

__all__ = [
    "CommandsOnly",
    "CurrentTransaction",
    "Cursor",
    "DatabaseNow",
    "DeadJob",
    "DeliveredVersion",
    "EntityRow",
    "EntityVersion",
    "Event",
    "EventLog",
    "Fence",
    "Gap",
    "GapQuerySet",
    "InboxEntry",
    "Incident",
    "Lease",
    "Node",
    "Overview",
    "ParkedStream",
    "Peer",
    "PreparedEvent",
    "Process",
    "Server",
    "ShadowJob",
    "ShadowNote",
    "ShadowResult",
    "StagedJob",
    "Statistic",
    "StreamHead",
    "Subscription",
    "TaskResult",
    "compare_bytes",
]
