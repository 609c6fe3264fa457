"""Back-off from a broker or a database that is unavailable. It is logged once, and at recovery.

Each failure in a row makes the pause longer, with jitter, up to ``MAX_BACKOFF``; the first success
ends it. No job counts these failures as attempts: after the recovery work resumes where it stopped.
"""

from __future__ import annotations

import logging
import random
import time

import django.db

from ..exceptions import OutboxError
from ..text import error_text, get_logger

logger = get_logger("outbox_app.drain")

#: The longest pause, in seconds.
MAX_BACKOFF = 5.0


class Backoff:
    """The failures in a row of a broker or a database, and the pause after the last one."""

    def __init__(self, of: object, logger: logging.Logger = logger) -> None:
        self.of = of
        self.logger = logger
        #: The type and message of the last error; empty when all is well.
        self.text = ""
        self.failures = 0
        self._until = float("-inf")

    @property
    def remaining(self) -> float:
        """Seconds until the next attempt."""
        return max(0.0, self._until - time.monotonic())

    def failed(self, error: BaseException) -> None:
        if not self.failures:
            trace = None if isinstance(error, OutboxError | django.db.Error) else error
            self.logger.warning("Unavailable what=%s error=%s", self.of, error, exc_info=trace)
        self.failures += 1
        self.text = error_text(error)
        longest = min(MAX_BACKOFF, 0.1 * 2 ** min(self.failures, 16))
        self._until = time.monotonic() + longest * random.uniform(0.5, 1)

    def wait_until(self, end: float) -> None:
        """Pause until this time on the monotonic clock, while one caller tries."""
        self._until = end

    def succeeded(self) -> None:
        if self.failures:
            self.logger.info("Available again what=%s after_failures=%d", self.of, self.failures)
            self.text, self.failures, self._until = "", 0, float("-inf")
