"""Log lines for the signals: a constant message, then ``key=value`` fields.

Importing this module connects them. A project's ``LOGGING`` decides which lines are shown.
"""

from __future__ import annotations

from typing import Any

from django.dispatch import receiver

from .. import signals
from ..text import get_logger

logger = get_logger("outbox_app.drain")


@receiver(signals.jobs_published)
def log_published(*, using: str, count: int, seconds: float, **kwargs: Any) -> None:
    logger.debug("Batch published database=%s jobs=%d seconds=%.3f", using, count, seconds)


@receiver(signals.job_dead)
def log_dead(*, using: str, dead: Any, **kwargs: Any) -> None:
    logger.error(
        "Job dead database=%s task=%s task_id=%s error=%s reason=%s",
        *(using, dead.task, dead.task_id, dead.error, dead.reason),
    )


@receiver(signals.incident_recorded)
def log_incident(*, using: str, incident: Any, **kwargs: Any) -> None:
    logger.warning(
        "Incident recorded database=%s kind=%s first_id=%d last_id=%d shards=%d detail=%s",
        *(using, incident.kind, incident.first_id, incident.last_id),
        *(len(incident.shards), incident.detail),
    )
