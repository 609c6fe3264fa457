"""Log lines for the signals of events.

Importing this module connects them, as that of ``outbox_app.monitoring.log_lines`` does for jobs.
"""

from __future__ import annotations

from typing import Any

from django.dispatch import receiver

from ..text import get_logger
from . import signals

logger = get_logger("outbox_app.events.subscriptions")


@receiver(signals.page_handled)
def log_page(
    *, using: str, subscription: str, partition: int, log: str, count: int, **kwargs: Any
) -> None:
    logger.debug(
        "Page handled database=%s subscription=%s partition=%d log=%s events=%d seconds=%.3f",
        *(using, subscription, partition, log, count, kwargs["seconds"]),
    )


@receiver(signals.page_failed)
def log_failure(
    *, using: str, subscription: str, partition: int, log: str, error: Exception, **kwargs: Any
) -> None:
    """Log the error that stops a partition; log its traceback at the first failure only."""
    failures = kwargs["failures"]
    logger.error(
        "Subscription failed database=%s subscription=%s partition=%d log=%s failures=%d error=%s",
        *(using, subscription, partition, log, failures, error),
        exc_info=error if failures == 1 else None,
    )


@receiver(signals.stream_parked)
def log_parked(*, using: str, parked: Any, **kwargs: Any) -> None:
    logger.error(
        "Stream parked database=%s subscription=%s log=%s stream=%s version=%d error=%s",
        *(using, parked.subscription, parked.log, parked.stream, parked.version, parked.error),
    )
