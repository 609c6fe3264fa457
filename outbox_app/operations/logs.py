"""Log lines, hung off the signals: a constant message, then ``key=value`` fields.

Loggers: ``outbox_app.intake``, ``.drain``, ``.inbox``, ``.dead``, ``.retention``. Nothing is
configured here; a project's ``LOGGING`` decides what is shown.
"""

from __future__ import annotations

import logging
from typing import Any

from ..signals import incident_recorded, job_dead, jobs_expired, jobs_published

logger = logging.getLogger("outbox_app.drain")


def connect() -> None:
    """Connect the log lines, once."""
    for signal, receiver in (
        (jobs_published, log_published),
        (jobs_expired, log_expired),
        (job_dead, log_dead),
        (incident_recorded, log_incident),
    ):
        signal.connect(receiver, dispatch_uid=f"outbox_app.logs.{receiver.__name__}")


def log_published(*, using: str, count: int, seconds: float, **kwargs: Any) -> None:
    """A batch left."""
    logger.debug("Batch published database=%s jobs=%d seconds=%.3f", using, count, seconds)


def log_expired(*, using: str, jobs: list[Any], **kwargs: Any) -> None:
    """Jobs were dropped, as a worker would have dropped them."""
    for job in jobs:
        logger.info("Job expired database=%s task=%s task_id=%s", using, job.task, job.task_id)


def log_dead(*, using: str, dead: Any, **kwargs: Any) -> None:
    """A job was given up on."""
    logger.error(
        "Job dead database=%s task=%s task_id=%s error=%s reason=%s",
        using,
        dead.task,
        dead.task_id,
        dead.error,
        dead.reason,
    )


def log_incident(*, using: str, incident: Any, **kwargs: Any) -> None:
    """Jobs may be published twice."""
    logger.warning(
        "Incident recorded database=%s kind=%s first_id=%d last_id=%d shards=%d detail=%s",
        using,
        incident.kind,
        incident.first_id,
        incident.last_id,
        len(incident.shards),
        incident.detail,
    )
