"""The outbox in Django's admin: staged jobs, dead jobs, drainers, incidents, and an overview.

Works with ``django.contrib.admin`` alone. Everything is read-only but for what a person decides:
requeue and discard dead jobs, delete a staged one.
"""

from django.contrib import admin

from ..models import DeadJob, Drainer, Incident, StagedJob
from .dead import DeadJobAdmin
from .drainer import DrainerAdmin, IncidentAdmin
from .job import StagedJobAdmin

__all__ = ["DeadJobAdmin", "DrainerAdmin", "IncidentAdmin", "StagedJobAdmin"]

admin.site.register(StagedJob, StagedJobAdmin)
admin.site.register(DeadJob, DeadJobAdmin)
admin.site.register(Drainer, DrainerAdmin)
admin.site.register(Incident, IncidentAdmin)
