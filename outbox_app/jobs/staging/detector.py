"""The detector: finds work that may be lost or come too early, in development and in CI.

A worker may get a task that is sent inside a transaction before the commit, or even if there is a
rollback. The detector watches each Celery app of the process, plain ones too, for a transaction of
the code on any alias, savepoints and ``durable`` included; a transaction of a ``TestCase`` does not
count. It ignores calls that are safe or meant: staged ones, ``retry()``, ``replace()``, and tasks
with the attribute ``outbox="send"``. It wraps two methods of Celery, because Celery's signals
swallow an exception of a receiver, and none is sent for an eager task.

An ``on_commit`` callback of code that does not run again is found before the commit, when that code
returns: see ``database.callbacks``. To log or to warn breaks nothing.
"""

from __future__ import annotations

import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import wraps
from types import FrameType
from typing import Any, Literal, NamedTuple

from celery import Celery
from celery.app.task import Task

from ...conf import outbox_settings
from ...database.callbacks import at_risk, pending
from ...database.transactions import open_transactions
from ...exceptions import SentInTransaction, UnsafeCallback
from ...text import get_logger
from .calls import called_for, comes_before_an_error, own_mode
from .sending import StagingMixin

logger = get_logger("outbox_app.detector")

Detect = Literal["log", "warn", "raise"]
#: Packages whose frames may be between the project's line and Celery.
_BETWEEN = {
    *("celery", "kombu", "outbox_app", "django", "asgiref", "sentry_sdk", "opentelemetry"),
    *("ddtrace", "newrelic", "elasticapm", "wrapt", "contextlib", "functools", "concurrent"),
}


class Finding(NamedTuple):
    """A place that sends a task inside a transaction."""

    task: str
    file: str
    line: int
    alias: str

    def __str__(self) -> str:
        return (
            f"{self.task} is sent at {self.file}:{self.line} inside a transaction on "
            f"{self.alias!r}: a worker may get it before the commit, or for a rollback. Send it "
            "from an OutboxCelery app or after the block; where it is meant, let the task have "
            "outbox='send'."
        )


class LateCallback(NamedTuple):
    """A callback of ``on_commit`` that is lost if it fails."""

    callback: str
    of: str
    file: str
    line: int
    alias: str

    def __str__(self) -> str:
        place = f" ({self.file}:{self.line})" if self.file else ""
        return (
            f"{self.of} leaves {self.callback}{place} to on_commit() on {self.alias!r}. If it "
            "raises, or the process dies before it, it is lost: the effects are committed, and "
            "nothing runs it again. Call delay() or stage() of a task inside the transaction, "
            "which commits the job with the effects; where a loss is accepted, pass robust=True."
        )


#: The places found in this process, and how many calls each has made.
found: Counter[Finding] = Counter()
#: The callbacks found in this process, and how often.
late: Counter[LateCallback] = Counter()
#: How many calls the detector has looked at, if any detector is on.
looked_at = 0
_warned: dict[Any, int] = {}
_chosen: Detect | None = None
_installed = False


def install(detect: Detect | None = None) -> None:
    """Watch each call from here on, and react as ``detect`` or else the setting DETECT says."""
    global _chosen, _installed
    _chosen = detect
    if _installed:
        return
    _installed = True
    send_task, apply_async = Celery.send_task, Task.apply_async

    @wraps(send_task)
    def look_and_send(
        app: Any, name: str, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any
    ) -> Any:
        _look(app, name, args, kwargs, options)
        return send_task(app, name, args, kwargs, *rest, **options)

    @wraps(apply_async)
    def look_if_eager_and_apply(
        task: Any, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any
    ) -> Any:
        if task.app.conf.task_always_eager:
            _look(task.app, task.name, args, kwargs, options)
        return apply_async(task, args, kwargs, *rest, **options)

    Celery.send_task = look_and_send  # type: ignore[method-assign, assignment]
    Task.apply_async = look_if_eager_and_apply  # type: ignore[method-assign, assignment]


def watching_callbacks(of: str, *, using: str) -> AbstractContextManager[None]:
    """Report the callbacks at risk that the block adds, before the transaction commits."""
    detect = _chosen or outbox_settings().DETECT
    return _watching(detect, of, using) if detect else nullcontext()


@contextmanager
def _watching(detect: str, of: str, using: str) -> Iterator[None]:
    before = pending(using)
    yield
    for name, file, line in at_risk(using, but=before):
        callback = LateCallback(name, of, file, line, using)
        late[callback] += 1
        if detect == "raise":
            raise UnsafeCallback(str(callback))
        if detect == "warn":
            text = str(callback)
            warnings.warn_explicit(text, RuntimeWarning, file or name, line, registry=_warned)
        elif late[callback] == 1:
            place = f"{file}:{line}" if file else ""
            text = "Callback is lost if it fails after the commit callback=%s at=%s of=%s alias=%s"
            logger.warning(text, name, place, of, using)


def report_callbacks(callbacks: Counter[LateCallback]) -> Iterable[str]:
    """Yield the lines of a report by handler or task, the callback that came most often first."""
    for callback, count in callbacks.most_common():
        yield f"{callback.of}: {callback.callback}: {count}"
        place = f"{os.path.relpath(callback.file)}:{callback.line} " if callback.file else ""
        yield f"    {place}({callback.alias})"


def report(findings: Counter[Finding]) -> Iterable[str]:
    """Yield the lines of a report by task: the most calls first, then in order of the names."""
    by_task: Counter[str] = Counter()
    for finding, count in findings.items():
        by_task[finding.task] += count
    in_order = sorted(findings.items(), key=lambda found: (-found[1], found[0]))
    for task, count in sorted(by_task.items(), key=lambda found: (-found[1], found[0])):
        yield f"{task}: {count}"
        for finding, times in in_order:
            if finding.task == task:
                place = os.path.relpath(finding.file)
                yield f"    {place}:{finding.line} ({finding.alias}): {times}"


def _look(app: Any, name: str, args: Any, kwargs: Any, options: dict[str, Any]) -> None:
    global looked_at
    try:
        detect = _chosen or outbox_settings().DETECT
        aliases = open_transactions() if detect else []
        looked_at += 1
        if not aliases or _is_meant(app, name, args, kwargs, options):
            return
        frame = _caller()
        finding = Finding(name, frame.f_code.co_filename, frame.f_lineno, aliases[0])
        found[finding] += 1
    except Exception:
        logger.exception("Detector failed task=%s", name)
        return
    if detect == "raise":
        raise SentInTransaction(str(finding))
    if detect == "warn":
        registry = frame.f_globals.setdefault("__warningregistry__", {})
        _, file, line, _ = finding
        warnings.warn_explicit(str(finding), RuntimeWarning, file, line, registry=registry)
    elif found[finding] == 1:
        text = "Task sent inside a transaction task=%s at=%s database=%s"
        logger.warning(text, name, f"{finding.file}:{finding.line}", finding.alias)


def _is_meant(app: Any, name: str, args: Any, kwargs: Any, options: dict[str, Any]) -> bool:
    if isinstance(app, StagingMixin) and app.outbox_mode(name, args, kwargs) == "stage":
        return True
    if own_mode(app, called_for(name, args, kwargs)) == "send":
        return True
    return comes_before_an_error(options)


def _caller() -> FrameType:
    """Return the frame of the line of the project that makes the call."""
    frame = sys._getframe(2)
    while frame.f_back and str(frame.f_globals.get("__name__")).partition(".")[0] in _BETWEEN:
        frame = frame.f_back
    return frame
