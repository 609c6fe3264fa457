"""Callbacks of ``transaction.on_commit`` in a transaction whose code does not run again.

The effects of a handler, a command or an idempotent task are committed with a cursor, a version or
a job id, and a callback runs after that commit. If it raises, or the process dies before it has
run, nothing repeats it: it is *at risk*. Django is not wrapped: callbacks are read from, and
replaced in, the connection's ``run_on_commit`` before the commit. A callback is not at risk if it
is the package's own, or if the project has passed ``robust=True``, which says that it may fail.
"""

from __future__ import annotations

from collections.abc import Callable, Container
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from types import FunctionType
from typing import Any, NamedTuple

from celery import Signature, Task
from celery.exceptions import SoftTimeLimitExceeded
from celery.local import Proxy
from django.db import connections

from ..exceptions import OutboxError
from ..text import get_logger

logger = get_logger("outbox_app.callbacks")

_PACKAGE = __name__.partition(".")[0]


class Callback(NamedTuple):
    """Where a callback is defined; ``file`` is empty if only its name is known."""

    name: str
    file: str
    line: int

    def __str__(self) -> str:
        return f"{self.name} ({self.file}:{self.line})" if self.file else self.name


@dataclass
class AfterCommit:
    """How the callbacks of a transaction have ended. It is filled after the commit."""

    #: The callbacks at risk that have raised, with their errors.
    failed: list[tuple[Callback, BaseException]] = field(default_factory=list)
    #: What came meanwhile to end this thread, or its task: time limits, and a SystemExit.
    limits: list[BaseException] = field(default_factory=list)


def named_callback(function: Callable[[], Any], call: Callable[[Any], Any]) -> Callable[[], Any]:
    """Return a callback for ``call(function)`` with a name for Django's log: partials have none."""

    def run() -> Any:
        return call(function)

    with suppress(Exception):  # a proxy of RPC answers for its name itself
        update_wrapper(run, function)
    run.__wrapped__ = function  # type: ignore[attr-defined]
    return run


def pending(using: str) -> dict[int, Any]:
    """Return the callbacks of the open transaction by their ids, which the result keeps unique."""
    return {id(hook): hook for _, hook, _ in _hooks(using)}


def at_risk(using: str, *, but: Container[int] = ()) -> list[Callback]:
    """Return the callbacks at risk of the open transaction, without those that were pending."""
    return [
        found
        for _, hook, robust in _hooks(using)
        if not robust and id(hook) not in but and (found := _found(hook))
    ]


def keep_callbacks_apart(using: str, *, of: str, alone: bool = False) -> AfterCommit:
    """Let each callback of the open transaction run, even if others raise, which is logged.

    If all are of one caller (``alone``), what ends its thread, as SystemExit, is raised at once.
    """
    after = AfterCommit()

    def run(callback: Callback | None, hook: Callable[[], object]) -> None:
        try:
            hook()
        except BaseException as error:
            ordinary = isinstance(error, Exception)
            if alone and not ordinary:
                raise
            if not ordinary or isinstance(error, SoftTimeLimitExceeded):
                after.limits.append(error)
            if callback is None and ordinary:
                raise  # Django logs it
            if callback is None:  # the callbacks behind it run, too
                raise OutboxError(f"A callback raised {error!r} after the commit.") from error
            after.failed.append((callback, error))
            logger.error(
                "Callback failed after the commit and does not run again; delay() inside the "
                "transaction would be committed with it callback=%s of=%s error=%s",
                callback,
                of,
                error,
                exc_info=error,
            )

    hooks = _hooks(using)
    hooks[:] = [
        (sids, named_callback(hook, partial(run, None if robust else _found(hook))), True)
        for sids, hook, robust in hooks
    ]
    return after


def _hooks(using: str) -> list[Any]:
    return connections[using].run_on_commit


def _found(hook: Any) -> Callback | None:
    """Return a callback by its name and place; None if it is the package's own."""
    try:
        return _described(_innermost(hook))
    except Exception:  # an object that answers for its attributes itself
        return Callback(type(hook).__qualname__, "", 0)


def _innermost(hook: Any) -> Any:
    while True:
        if isinstance(hook, partial):
            hook = hook.func
        elif type(hook) is FunctionType and vars(hook).get("__wrapped__", hook) is not hook:
            hook = vars(hook)["__wrapped__"]
        elif isinstance(hook, Proxy):
            return hook._get_current_object()
        else:
            return hook


def _described(hook: Any) -> Callback | None:
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    if not isinstance(name, str):
        return Callback(type(hook).__qualname__, "", 0)
    owner = getattr(hook, "__self__", hook)
    if isinstance(owner, Task | Signature):  # task.delay, or a signature itself
        method = "" if owner is hook else f".{hook.__name__}"
        return Callback(f"{owner.name}{method}", "", 0)
    module = str(getattr(hook, "__module__", None) or type(owner).__module__)
    home = str(getattr(owner, "__module__", module)).partition(".")[0]
    # A project may pass a function of the API, such as publish().
    if home == _PACKAGE and (owner is not hook or "<locals>" in name or name.startswith("_")):
        return None
    if path := getattr(owner, "module_path", None):  # enqueue() of a task of django.tasks
        return Callback(f"{path}.{hook.__name__}", "", 0)
    code = getattr(getattr(hook, "__func__", hook), "__code__", None)
    place = (code.co_filename, code.co_firstlineno) if code else ("", 0)
    return Callback(f"{module}.{name}", *place)
