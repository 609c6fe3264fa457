"""Results while their jobs are staged: backends are not contacted, endless waits are refused.

Celery subscribes to a task's result when it sends the task, builds a group or freezes a chain; with
Redis each of these opens a connection. A job that was just staged has no result yet, so the
subscription is deferred: ``get()`` and ``join()`` first subscribe to every deferred result that is
still referenced. With ``rpc://`` the drain declares the reply queue before it publishes the job, so
that an early result is kept.

A wait for a result inside the transaction that staged its job would never end, as the job leaves
after the commit. So ``get()`` and ``join()`` raise at once, as Celery's do inside a task. After the
rollback to a savepoint the ids are no longer known, and a wait is not refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import wraps
from typing import Any
from weakref import WeakValueDictionary

from celery._state import task_join_will_block  # type: ignore[attr-defined]
from django.db import connections

from ...exceptions import StillStaged
from .calls import surrounded
from .producer import StagingProducer

#: The most ids that are kept for one transaction.
IDS = 10_000


def wrap_backend(backend: Any, staging: Callable[[], bool]) -> Any:
    """Make ``backend`` subscribe at the first wait to results that were made while ``staging()``.

    Its waiting methods refuse endless waits; a task that it sends for a chord is a follow-up.
    """
    if hasattr(backend, "_outbox_deferred"):
        return backend
    deferred = WeakValueDictionary[int, Any]()
    if vars(backend).setdefault("_outbox_deferred", deferred) is not deferred:
        return backend  # another thread is wrapping it
    reply_queue = hasattr(backend, "binding")
    on_task_call, note_part = backend.on_task_call, backend.on_chord_part_return
    subscribe: Any = getattr(backend, "add_pending_result", None)  # Celery's class Backend has none
    remove: Any = getattr(backend, "remove_pending_result", None)

    def on_task_call_unless_staging(producer: Any, task_id: str) -> Any:
        if not staging():
            return on_task_call(producer, task_id)
        if reply_queue and isinstance(producer, StagingProducer) and not task_join_will_block():
            producer.also_declare.append(backend.binding)
        return {}

    def add_pending_result(result: Any, *args: Any, **kwargs: Any) -> Any:
        if staging():
            deferred[id(result)] = result
            return result
        return subscribe(result, *args, **kwargs)

    def remove_pending_result(result: Any) -> Any:
        deferred.pop(id(result), None)
        return remove(result)

    def subscribing(wait: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(wait)
        def subscribe_and_wait(result: Any, *args: Any, **kwargs: Any) -> Any:
            refuse_endless_wait(result)
            # Before Celery checks which results of a group are there: subscribing may find one.
            # Subscribe, then pop, one by one: other threads may add results, or wait, meanwhile.
            for each in [reference() for reference in deferred.valuerefs()]:
                if each is not None:
                    subscribe(each, weak=True)
                    deferred.pop(id(each), None)
            return wait(result, *args, **kwargs)

        return subscribe_and_wait

    def on_chord_part_return(*args: Any, **kwargs: Any) -> Any:
        with surrounded(is_chord_part=True):
            return note_part(*args, **kwargs)

    backend.on_task_call = on_task_call_unless_staging
    backend.on_chord_part_return = on_chord_part_return
    if subscribe is not None:
        backend.add_pending_result = add_pending_result
        backend.remove_pending_result = remove_pending_result
    for name in ("wait_for_pending", "iter_native"):
        if hasattr(backend, name):
            setattr(backend, name, subscribing(getattr(backend, name)))
    return backend


def remember_staged(task_id: str, *, using: str) -> None:
    """Remember the id of a job that was staged in the open transaction of an alias."""
    ids = _staged_in(connections[using])
    if len(ids) < IDS:
        ids.add(task_id)


def forget_staged(task_ids: Iterable[str], *, using: str) -> None:
    """Forget the ids of jobs that were run or published inside a test's transaction."""
    _staged_in(connections[using]).difference_update(task_ids)


def refuse_endless_wait(result: Any) -> None:
    """Raise ``StillStaged`` if an open transaction of this thread has staged the result's job."""
    staged: set[str] = set().union(*map(_staged_in, connections.all(initialized_only=True)))
    if staged and (task_id := _find(result, staged)):
        raise StillStaged(
            f"The result of job {task_id} was waited for inside the transaction that staged it. "
            "The job leaves after the commit, so that would never end. Wait behind the block; a "
            "TestCase never commits, so let the task be eager there."
        )


def _staged_in(connection: Any) -> set[str]:
    """Return the ids of jobs staged in a connection's open transaction."""
    if not connection.in_atomic_block:
        return set()  # staged jobs are committed, and will leave
    # Django replaces run_on_commit at each commit and rollback, so it identifies the transaction.
    if getattr(connection, "outbox_staged", (None,))[0] is not connection.run_on_commit:
        connection.outbox_staged = connection.run_on_commit, set()
    ids: set[str] = connection.outbox_staged[1]
    return ids


def _find(result: Any, staged: set[str]) -> str | None:
    """Return a staged id of the result, its children, or its parents in a chain of any length."""
    waiting = [result]
    while waiting:
        each = waiting.pop()
        own = getattr(each, "id", None)  # a ResultSet has none
        if own in staged:
            return str(own)
        waiting += getattr(each, "results", ())
        if parent := getattr(each, "parent", None):
            waiting.append(parent)
    return None
