"""Prepared events in tests: what was prepared, and what has become of it.

In a plain ``TestCase`` leaving the block of ``prepared()`` counts as the commit, or as the rollback
where it raises: its event is confirmed, or cancelled, when the block ends. The test's ``databases``
have both aliases, the sender's and the keeper's.
"""

from __future__ import annotations

from typing import Any

from ..aliases import outbox_alias
from ..models import PreparedEvent
from .events import LISTED


def assert_prepared(
    type: str,
    data: Any = None,
    *,
    stream: str | None = None,
    state: str | None = None,
    count: int = 1,
    using: str | None = None,
) -> list[PreparedEvent]:
    """Assert that an event was prepared, ``count`` times exactly, in any state.

    Args:
        type: Exact type, or name of the job's task.
        data: Its data, all of it. Default: any.
        stream: Its stream. Default: any.
        state: "prepared", "confirmed", "cancelled" or "undecided". Default: any.
        count: How many of these; 0: none.
        using: The keeper's alias. Default: the outbox's.

    Returns:
        The rows: ``event_id``, ``sender``, ``state``, ``content``.

    Raises:
        AssertionError: There are more or fewer. The message lists what was prepared.
    """
    __tracebackhide__ = True  # pytest shows the test's line, not this one
    wanted = {"type": type, "stream": stream, "state": state}
    rows = list(PreparedEvent.objects.using(using or outbox_alias()).order_by("id"))
    found = [
        row
        for row in rows
        if all(value in (None, getattr(row, name)) for name, value in wanted.items())
        and data in (None, row.content.get("data"))
    ]
    if len(found) != count:
        lines = [f"  {r.type} {r.stream} {r.state} {r.content!r}"[:200] for r in rows[:LISTED]]
        listed = "\n".join(["Prepared:", *lines]) if lines else "Nothing was prepared."
        what = f"{state or 'prepared'} of {type}"
        raise AssertionError(f"Expected {count} {what}; found {len(found)}.\n{listed}")
    return found


def assert_confirmed(
    type: str,
    data: Any = None,
    *,
    stream: str | None = None,
    count: int = 1,
    using: str | None = None,
) -> list[PreparedEvent]:
    """As ``assert_prepared``, of those that were confirmed: published, or staged as jobs."""
    __tracebackhide__ = True
    confirmed = PreparedEvent.State.CONFIRMED
    return assert_prepared(type, data, stream=stream, state=confirmed, count=count, using=using)
