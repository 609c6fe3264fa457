"""Log lines for the signals: a constant message, then ``key=value`` fields.

Importing this module connects them. A project's ``LOGGING`` decides which lines are shown.
"""

from __future__ import annotations

from typing import Any

from django.dispatch import receiver

from .. import signals
from ..text import get_logger

events = get_logger("outbox_app.events.subscriptions")
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


@receiver(signals.page_handled)
def log_page(
    *, using: str, subscription: str, partition: int, log: str, count: int, **kwargs: Any
) -> None:
    events.debug(
        "Page handled database=%s subscription=%s partition=%d log=%s events=%d seconds=%.3f",
        *(using, subscription, partition, log, count, kwargs["seconds"]),
    )


@receiver(signals.page_failed)
def log_failure(
    *, using: str, subscription: str, partition: int, log: str, error: Exception, **kwargs: Any
) -> None:
    """Log the error that stops a partition; log its traceback at the first failure only."""
    failures = kwargs["failures"]
    events.error(
        "Subscription failed database=%s subscription=%s partition=%d log=%s failures=%d error=%r",
        *(using, subscription, partition, log, failures, error),
        exc_info=error if failures == 1 else None,
    )


@receiver(signals.stream_parked)
def log_parked(*, using: str, parked: Any, **kwargs: Any) -> None:
    events.error(
        "Stream parked database=%s subscription=%s log=%s stream=%s version=%d error=%s",
        *(using, parked.subscription, parked.log, parked.stream, parked.version, parked.error),
    )
