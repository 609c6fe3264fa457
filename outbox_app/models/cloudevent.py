"""An event in the JSON format of CloudEvents 1.0.

By hand: it is one dictionary, and the SDK would bring dependencies of its own. The stream is the
``subject``; version, position and topic are the extension attributes ``streamversion``,
``position`` and ``topic``, as strings, because CloudEvents' integers have 32 bits.
"""

from __future__ import annotations

from typing import Any


def cloudevent(event: Any, *, log: str, source: str = "") -> dict[str, Any]:
    """Return the attributes and data of an event.

    Args:
        event: A row of a log, or its record.
        log: Table of the log.
        source: URI reference of the publishing system. Default: the log's table.
    """
    time = event.recorded_at.isoformat()
    return {
        "specversion": "1.0",
        "id": str(event.message_id),
        "source": source or log,
        "type": event.type,
        "subject": event.stream,
        "time": time if event.recorded_at.tzinfo else f"{time}Z",
        "datacontenttype": "application/json",
        "streamversion": str(event.version),
        "position": str(event.id),
        **({"topic": event.topic} if event.topic else {}),
        "data": event.data,
    }
