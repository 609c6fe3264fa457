"""Results of jobs whose transaction is still open: to wait for one would never end.

Such a job leaves after the commit, and the commit comes after the wait. So ``get()`` and ``join()``
raise at once, as Celery's do inside a task. Which transaction is open is told by the list of
callbacks that Django keeps for it, which each commit and rollback replaces. After the rollback of a
savepoint nothing is known any more, and waiting waits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from django.db import connections

from ...exceptions import StillStaged
from ...transactions import is_atomic

#: Ids that are kept of one transaction, at most.
IDS = 10_000


def note(task_id: str, *, using: str) -> None:
    """Note that a job was staged in the open transaction of an alias."""
    connection: Any = connections[using]
    if not connection.in_atomic_block:
        return  # it is committed, and will leave
    if getattr(connection, "outbox_staged", (None,))[0] is not connection.run_on_commit:
        connection.outbox_staged = connection.run_on_commit, set()
    ids: set[str] = connection.outbox_staged[1]
    if len(ids) < IDS:
        ids.add(task_id)


def forget(task_id: str, *, using: str) -> None:
    """Note that a job was executed inside its transaction, as ``run_staged()`` does."""
    getattr(connections[using], "outbox_staged", (None, set()))[1].discard(task_id)


def refuse_waiting(wait: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap what a result backend waits with, so that it refuses what could never end."""

    @wraps(wait)
    def wait_unless_staged(result: Any, *args: Any, **kwargs: Any) -> Any:
        staged = _staged_now()
        if staged and (task_id := _find(result, staged)):
            raise StillStaged(
                f"The result of job {task_id} was waited for inside the atomic() that staged it. "
                "The job leaves after the commit, so that would never end. Wait behind the block."
            )
        return wait(result, *args, **kwargs)

    wait_unless_staged.refuses = True  # type: ignore[attr-defined]
    return wait_unless_staged


def _staged_now() -> set[str]:
    found: set[str] = set()
    for connection in connections.all(initialized_only=True):
        opened, ids = getattr(connection, "outbox_staged", (None, set()))
        if ids and opened is connection.run_on_commit and is_atomic(connection.alias):
            found |= ids
    return found


def _find(result: Any, staged: set[str]) -> str | None:
    """Return the first of the result, its children and those before it in a chain."""
    if result is None:
        return None
    own = getattr(result, "id", None)  # a ResultSet has none
    if own in staged:
        return str(own)
    for each in [*getattr(result, "results", ()), getattr(result, "parent", None)]:
        if found := _find(each, staged):
            return found
    return None
