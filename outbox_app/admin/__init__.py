"""Jobs in Django's admin: staged and dead ones, drainers, incidents, statistics, an overview.

The pages need ``django.contrib.admin`` only. They are read-only but for these actions: requeue and
discard dead jobs; cancel staged jobs. The pages of a capability are in its own ``admin``, on the
mechanism of this package.
"""

from .dead import DeadJobAdmin
from .process import IncidentAdmin, OverviewAdmin, ProcessAdmin, StatisticAdmin
from .staged import StagedJobAdmin

__all__ = ["DeadJobAdmin", "IncidentAdmin", "OverviewAdmin", "ProcessAdmin", "StagedJobAdmin",
           "StatisticAdmin"]  # fmt: skip
