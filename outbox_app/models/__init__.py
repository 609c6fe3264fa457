"""Re-exports all models of the core: Django imports this package and nothing below it."""

from .job import DeadJob, InboxEntry, Incident, StagedJob
from .process import Lease, Overview, Process
from .statistic import Statistic

__all__ = [
    "DeadJob", "InboxEntry", "Incident", "Lease", "Overview", "Process", "StagedJob",
    "Statistic",
]  # fmt: skip
