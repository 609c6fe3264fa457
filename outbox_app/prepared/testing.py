"""Prepared events in tests: assert which events were prepared, and how they were decided.

In a plain ``TestCase`` the end of a ``prepared()`` block counts as the commit, or as the rollback
if it raises: its event is confirmed or cancelled then. List both aliases in the test's
``databases``, the sender's and the keeper's.
"""

from __future__ import annotations

from typing import Any

from ..aliases import outbox_alias
from ..testing.job import LISTED
from .models import PreparedEvent

__all__ = ["assert_confirmed", "assert_prepared"]


def assert_prepared(
    type: str,
    data: Any = None,
    *,
    stream: str | None = None,
    state: str | None = None,
    count: int = 1,
    using: str | None = None,
) -> list[PreparedEvent]:
    """Assert that an event was prepared exactly ``count`` times, in any state.

    Args:
        type: Exact type, or the name of the job's task.
        data: All of the event's data. Default: any.
        stream: The event's stream. Default: any.
        state: "prepared", "confirmed", "cancelled" or "undecided". Default: any.
        count: The expected number; 0: none.
        using: The keeper's alias. Default: the outbox's.

    Returns:
        The rows: ``event_id``, ``sender``, ``state``, ``content``.

    Raises:
        AssertionError: There are more or fewer. The message lists the prepared events.
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
    """Like ``assert_prepared``, for confirmed events: those published, or staged as jobs."""
    __tracebackhide__ = True
    confirmed = PreparedEvent.State.CONFIRMED
    return assert_prepared(type, data, stream=stream, state=confirmed, count=count, using=using)
