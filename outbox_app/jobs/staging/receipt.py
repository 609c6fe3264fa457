"""Which jobs have a receipt: their rows stay until a worker has executed them.

The task decides by its attribute, ``@app.task(receipt=3600)``, which is the limit in seconds within
which a worker must start a job. Else the first pattern of ``OUTBOX["RECEIPTS"]`` that matches its
name decides. ``receipt=0`` turns a pattern off for one task.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from celery.app.task import Task

from ...conf import MOST_LIMIT, outbox_settings
from ...exceptions import InvalidJob

#: Starts without an end after which a job is dead.
ATTEMPTS = 5
#: The strategy and the method of Celery's workers, through which they start a task.
STRATEGY = "celery.worker.strategy:default"


class Receipt(NamedTuple):
    #: Seconds.
    limit: int
    attempts: int = ATTEMPTS


def receipt_of(task: Any, name: str) -> Receipt | None:
    """Return the receipt of a task's jobs, or None.

    Args:
        task: The task, or None if it is not loaded here.
        name: Its name.

    Raises:
        InvalidJob: Its attribute is no number of seconds.
    """
    pattern = _by_pattern(name)
    own = getattr(task, "receipt", None)
    if own is None:
        return pattern
    limit = checked_limit(own, f"receipt of {name}")
    return Receipt(limit, pattern.attempts if pattern else ATTEMPTS) if limit else None


def checked_limit(value: Any, what: str) -> int | None:
    """Return a limit, or None for 0. Raises ``InvalidJob`` if it is no number of seconds."""
    if type(value) is not int or not 0 <= value <= MOST_LIMIT:
        raise InvalidJob(
            f"{what} is {value!r}; expected seconds, an integer from 1 to {MOST_LIMIT}, or 0 for "
            "no receipt."
        )
    return value or None


def _by_pattern(name: str) -> Receipt | None:
    receipts = outbox_settings().RECEIPTS
    pattern = next((each for each in receipts if fnmatchcase(name, each)), None)
    return None if pattern is None else Receipt(**receipts[pattern])


def check_worker(task: Any, name: str) -> None:
    """Refuse a receipt that no worker would give, as it starts the task in a way of its own.

    Raises:
        InvalidJob: The task's class has a ``__trace__`` or a ``Strategy`` of its own.
    """
    if task is None:  # only workers know it
        return
    kind = type(task)
    own = [each for each in ("__trace__",) if _defined_by(kind, each) is not Task]
    if getattr(task, "Strategy", STRATEGY) != STRATEGY:
        own.append("Strategy")
    if own:
        raise InvalidJob(
            f"Task {name} has a receipt, and its class {kind.__module__}.{kind.__qualname__} has "
            f"its own {' and '.join(own)}, so no worker would give one. Remove these, or set "
            "receipt = 0."
        )


def _defined_by(kind: type, name: str) -> type | None:
    return next((each for each in kind.__mro__ if name in vars(each)), None)


_known: WeakKeyDictionary[Any, tuple[int, bool]] = WeakKeyDictionary()


def has_receipts(app: Any) -> bool:
    """Return whether any task of an app may have a receipt."""
    if outbox_settings().RECEIPTS:
        return True
    tasks = app._tasks
    if not isinstance(tasks, Mapping):  # a registry of a project's own, which may have no list
        return True
    known = _known.get(app)
    if known is None or known[0] != len(tasks):
        found = any(getattr(task, "receipt", None) for task in list(tasks.values()))
        known = _known[app] = len(tasks), found
    return known[1]
