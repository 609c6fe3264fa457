"""Failures in a row of one thing, a broker or the database: said once, and rested from.

Each failure makes the rest longer, with jitter, up to ``MAX_BACKOFF``; the first success ends it.
No job's attempts are counted: what is away comes back, and everything goes on where it stopped.
"""

from __future__ import annotations

import logging
import random
import time

import django.db

from ..conf import outbox_settings
from ..exceptions import OutboxError
from ..text import get_logger, storable

logger = get_logger("outbox_app.drain")


class Trouble:
    """What is wrong with something, and for how long it is left alone.

    Args:
        of: What it is, for the log.
        logger: Whose log. Default: the drain's.
    """

    def __init__(self, of: object, logger: logging.Logger = logger) -> None:
        self.of = of
        self.logger = logger
        #: In the exception's own words; empty when all is well.
        self.text = ""
        #: In a row.
        self.failures = 0
        self._until = float("-inf")

    @property
    def rest(self) -> float:
        """Seconds for which it is still left alone."""
        return max(0.0, self._until - time.monotonic())

    def note(self, error: Exception) -> None:
        """It failed (again)."""
        if not self.failures:
            unexpected = not isinstance(error, OutboxError | django.db.Error)
            self.logger.warning(
                "In trouble with=%s error=%r",
                self.of,
                error,
                exc_info=error if unexpected else None,
            )
        self.failures += 1
        self.text = storable(f"{type(error).__name__}: {error}")
        longest = min(outbox_settings().MAX_BACKOFF, 0.1 * 2 ** min(self.failures, 16))
        self._until = time.monotonic() + longest * random.uniform(0.5, 1)

    def over(self) -> None:
        """It worked."""
        if self.failures:
            self.logger.warning("Goes on again with=%s after_failures=%d", self.of, self.failures)
            self.text, self.failures, self._until = "", 0, float("-inf")


def described(error: BaseException) -> str:
    """Return type, message and notes of an error, as every database can store them."""
    try:
        text = str(error)
    except Exception as other:  # of a class whose author was not careful
        text = f"its text cannot be had ({type(other).__name__})"
    notes = getattr(error, "__notes__", [])
    return storable("\n".join([f"{type(error).__name__}: {text}", *notes]))[:10_000]
