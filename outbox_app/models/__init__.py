"""All models of the app, re-exported: Django looks for them here and nowhere below."""

from .clock import DatabaseNow
from .drainer import Drainer, Lease
from .inbox import InboxEntry
from .incident import Incident
from .job import DeadJob, StagedJob

__all__ = ["DatabaseNow", "DeadJob", "Drainer", "InboxEntry", "Incident", "Lease", "StagedJob"]
