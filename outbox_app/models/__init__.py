"""Re-exports all models of the core: Django imports this package and nothing below it."""

from .job import DeadJob, InboxEntry, Incident, Run, StagedJob
from .process import Lease, Overview, Process
from .statistic import Statistic

__all__ = [
    "DeadJob", "InboxEntry", "Incident", "Lease", "Overview", "Process", "Run",
    "StagedJob", "Statistic",
]  # fmt: skip
