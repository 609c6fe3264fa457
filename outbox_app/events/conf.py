"""The keys of ``OUTBOX`` for events."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..conf import MAX_DAYS, Rule, read

#: Number of slices of a log. Rows keep the slice they were published with.
SLICES = 1024


def _are_sinks(value: Any) -> bool:
    return isinstance(value, dict) and all(map(_is_sink, value.items()))


def _is_sink(item: Any) -> bool:
    log, value = item
    if not isinstance(log, str) or not isinstance(value, tuple | list) or len(value) != 2:
        return False
    archive, days = value
    lasts = type(days) is int and 1 <= days <= MAX_DAYS
    return lasts and isinstance(archive, str) and archive != ""


SINKS = Rule(_are_sinks, "a dictionary of logs by their tables, each with (archive, days)")


@dataclass(frozen=True, slots=True)
class EventSettings:
    """They have the defaults that the documentation names."""

    #: Seconds between two polls of an idle subscription. None: as for INTERVAL.
    SUBSCRIPTION_INTERVAL: float | None = None
    #: Days for which events are kept once every subscription has passed them. None: without limit.
    EVENT_RETENTION_DAYS: int | None = None
    #: Logs whose old events are pruned automatically: by table, the archive's folder or address and
    #: the age in days. An event stays until it is archived and every subscription has passed it.
    SINK: Mapping[str, tuple[str, int]] = field(default_factory=dict, metadata={"rule": SINKS})
    #: Largest data and metadata of an event, in bytes of JSON each.
    MAX_EVENT_BYTES: int = 256 * 1024
    #: MySQL: seconds after which a missing position whose row was never seen counts as never used.
    SETTLE_SECONDS: float = 5.0
    #: MySQL: seal positions that were never used with a tombstone row.
    TOMBSTONES: bool = False
    #: Events handed to a subscriber at once.
    PAGE_SIZE: int = 500
    #: Longest pause before a failed page is tried again, in seconds.
    MAX_RETRY_DELAY: float = 60.0


def event_settings() -> EventSettings:
    """Return the settings of events."""
    return read(EventSettings)
