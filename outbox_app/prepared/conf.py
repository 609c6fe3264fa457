"""The keys of ``OUTBOX`` for prepared events."""

from __future__ import annotations

from dataclasses import dataclass

from ..conf import read


@dataclass(frozen=True, slots=True)
class PreparedSettings:
    """They have the defaults that the documentation names."""

    #: The most seconds that a sender may ask for until the policy of a prepared event decides.
    PREPARED_MAX_DECIDE_BY: float = 14 * 86400.0
    #: Days for which the keeper keeps decided events.
    PREPARED_RETENTION_DAYS: int = 30
    #: Days for which a sender keeps fences. Longer than any keeper may still ask about one.
    FENCE_RETENTION_DAYS: int = 30


def prepared_settings() -> PreparedSettings:
    """Return the settings of prepared events."""
    return read(PreparedSettings)
