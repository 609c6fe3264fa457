"""Result backends stay untouched while jobs are staged.

Celery subscribes to a task's result when it sends the task, builds a group or freezes a chain; with
Redis each opens a connection. A job that was just staged has no result yet, so the subscription is
put off until somebody waits: ``get()`` and ``join()`` subscribe first to everything that was put
off and is still referenced. With ``rpc://`` the drain declares the reply queue before it publishes
the job, so that an early result is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

from celery._state import task_join_will_block  # type: ignore[attr-defined]

from .producer import StagingProducer


def put_off_subscriptions(backend: Any, staging: Callable[[], bool]) -> Any:
    """Make ``backend`` subscribe only when somebody waits, for results made while ``staging()``.

    Args:
        backend: A Celery result backend; changed in place, once.
        staging: Says whether the calling thread stages at this moment.

    Returns:
        The backend.
    """
    if hasattr(backend, "_outbox_put_off"):
        return backend
    put_off = WeakValueDictionary[int, Any]()
    reply_queue = hasattr(backend, "binding")
    on_task_call = backend.on_task_call
    subscribe: Any = getattr(
        backend, "add_pending_result", None
    )  # no part of Celery's class Backend

    def on_task_call_unless_staging(producer: Any, task_id: str) -> Any:
        if not staging():
            return on_task_call(producer, task_id)
        if reply_queue and isinstance(producer, StagingProducer) and not task_join_will_block():
            producer.also_declare.append(backend.binding)
        return {}

    def add_pending_result(result: Any, *args: Any, **kwargs: Any) -> Any:
        if staging():
            put_off[id(result)] = result
            return result
        return subscribe(result, *args, **kwargs)

    def wait_for_pending(result: Any, **kwargs: Any) -> Any:
        results = list(put_off.values())
        put_off.clear()
        for each in results:
            subscribe(each, weak=True)
        return wait(result, **kwargs)

    backend.on_task_call = on_task_call_unless_staging
    if subscribe is not None:
        backend.add_pending_result = add_pending_result
    if hasattr(backend, "_wait_for_pending"):  # AsyncBackendMixin: all waiting goes through here
        wait = backend._wait_for_pending
        backend._wait_for_pending = wait_for_pending
    backend._outbox_put_off = put_off
    return backend
