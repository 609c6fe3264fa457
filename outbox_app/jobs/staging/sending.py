"""The hooks on Celery: the mixin that replaces ``Celery.send_task``, and all others; the apps.

``calls`` decides which calls are staged, ``producer`` writes the rows. Each hook lets Celery's own
code run, which Celery's users and tracing tools also wrap.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from contextlib import nullcontext
from functools import wraps
from inspect import signature
from types import FunctionType, SimpleNamespace
from typing import Any
from weakref import WeakSet

from celery import Celery, current_app
from celery._state import _get_active_apps  # type: ignore[attr-defined]
from celery.app.task import Task
from celery.canvas import Signature, group
from celery.utils.dispatch import Signal
from django.apps import apps
from kombu.utils.objects import cached_property

from ...aliases import outbox_alias
from ...database.transactions import is_atomic
from ...exceptions import StagingRefused
from ...text import get_logger
from ..context import in_own_context
from . import validation
from .calls import Call, Mode, around, loaded_task, may_stage, mode_here, shadow_mode, surrounded
from .producer import LazyProducer, StagingProducer, or_staged, with_quick_reprs
from .receipt import check_worker
from .results import remember_staged, wrap_backend
from .template import Grouped, Templates

logger = get_logger("outbox_app.staging")
shadow_logger = get_logger("outbox_app.shadow")

# Every hook on Celery. The code of each says why it exists:
#
#   this module         Celery.send_task, producer_or_acquire, producer_pool and backend; the class
#                       of a plain app that ``stage()`` was given; Task.on_replace and
#                       group._apply_tasks of all apps; locks in a forked child
#   results             on_task_call, on_chord_part_return, add_pending_result,
#                       remove_pending_result, wait_for_pending and iter_native of a result
#                       backend
#   producer            send_task_message and create_task_message of ``app.amqp``; the class of
#                       after_task_publish and task_sent
#   message             outbox_configured_queues of ``app.amqp``
#   outbox_app.celery   the ``…_on_commit`` methods of a task
#   outbox_app.receipts __trace__ of celery.app.task.Task
#   detector            Celery.send_task and Task.apply_async of all apps, where DETECT is on

#: What ``Celery.send_task`` takes by position, after the name and the task's arguments.
_AFTER_ARGUMENTS = tuple(signature(Celery.send_task).parameters)[4:-1]
_OURS = ("ordering_key", "using", "immediate")


class StagingMixin:
    """Makes a Celery app stage. ``OutboxCelery`` is Celery with this mixin."""

    #: False for a plain app that ``stage()`` made stageable: its own ``delay()`` sends as before.
    stages_by_itself = True

    @in_own_context
    def send_task(self, name: str, *args: Any, **options: Any) -> Any:
        """Stage or send one task; takes the arguments of ``Celery.send_task`` and three options.

        The arguments of the caller are passed on, those after the first two by name: a class
        between this one and Celery may take fewer by position.

        Args:
            ordering_key: Jobs with one key leave in the order in which they were staged. Default:
                no order.
            using: Database alias to stage on. Default: the outbox's.
            immediate: Publish the job right after the commit. Default: the task's attribute
                ``immediate``, else OUTBOX["IMMEDIATE"].

        Returns:
            An ``AsyncResult``, as from Celery.

        Raises:
            NotAtomic: A transaction is open, but not on the outbox's alias; or none is open and the
                setting OUTSIDE refuses that.
            InvalidJob: The job could never be sent. The transaction stays usable.
        """
        by_name = dict(zip(_AFTER_ARGUMENTS, args[2:], strict=False))
        args, options = args[:2], dict(**by_name, **options)
        stamps = options.get("stamped_headers") or ()  # each is an option, maybe of our names
        ours = {key: options.pop(key) for key in _OURS if key in options and key not in stamps}
        if isinstance(options.get("producer"), LazyProducer):
            del options["producer"]
        task_args = args[0] if args else options.get("args")
        task_kwargs = args[1] if len(args) > 1 else options.get("kwargs")
        call = Call(self, name, task_args, task_kwargs, options, **ours)
        if call.own_immediate:
            options.setdefault("immediate", False)  # else Celery takes the attribute for AMQP's
        alias, record = call.alias, None
        if alias is not None:
            options["producer"] = self._staging(call, options, using=alias)
        elif call.mode == "shadow" and not call.is_by_hand:
            options["producer"] = record = self._recording(call, options)
        send: Any = super().send_task  # type: ignore[misc]
        if alias is not None:
            options["producer"].send_task = send
        with surrounded(staged="" if alias is None else name), record or nullcontext():
            result = send(name, *args, **options)
        if alias is not None and result is not None:  # a class in between may have sent nothing
            remember_staged(result.id, using=alias)
        return result

    def _staging(self, call: Call, options: dict[str, Any], *, using: str) -> StagingProducer:
        """Check the call, and return a producer that stages it."""
        validation.check_call(call.name, options, app=self)
        if call.receipt is not None:
            check_worker(loaded_task(self, call.name), call.name)
        amqp: Any = self.amqp  # type: ignore[attr-defined]
        if not hasattr(amqp.send_task_message, "wrapped"):
            amqp.send_task_message = or_staged(amqp.send_task_message)
            amqp.create_task_message = with_quick_reprs(amqp)
        return StagingProducer(
            self,  # type: ignore[arg-type]
            using=using,
            ordering_key=call.ordering_key,
            immediate=call.is_immediate,
            mode=call.mode,
            receipt=call.receipt,
        )

    def _recording(self, call: Call, options: dict[str, Any]) -> Any:
        """Return a producer that records what staging would do; None if it would send as well."""
        shadow, refused = shadow_mode(), ""
        try:
            if not shadow.is_expected(call.name):
                alias = call.alias_in("stage")
                if alias is None or not is_atomic(alias):
                    return None
            validation.check_call(call.name, options, app=self)
        except StagingRefused as error:
            refused = str(error)
        except Exception:
            shadow_logger.exception("Shadow mode failed task=%s", call.name)
            return None
        options = {"using": call.using or outbox_alias(), "ordering_key": call.ordering_key}
        return shadow.ShadowProducer(self, call.name, refused=refused, **options)

    def producer_or_acquire(self, producer: Any = None) -> Any:
        """Like Celery's; while staging, return a stand-in that stages its tasks together."""
        if producer is None and may_stage(self):
            return LazyProducer(self, strict=bool(around.get().using))
        return super().producer_or_acquire(producer)  # type: ignore[misc]

    default_producer = producer_or_acquire

    @property
    def producer_pool(self) -> Any:
        """Like Celery's; while staging, a pool that seems to lack native delayed delivery.

        Celery would encode the delay in the routing key, and a held job would wait twice.
        """
        return _NoNativeDelay(self) if around.get().staged else super().producer_pool  # type: ignore[misc]

    @property
    def backend(self) -> Any:
        """Like Celery's, with subscriptions to results deferred while staging."""
        backend = super().backend  # type: ignore[misc]
        return wrap_backend(backend, self._stages_here) if apps.models_ready else backend

    def outbox_mode(self, name: str, args: Any = None, kwargs: Any = None) -> Mode:
        """Return the mode of a call made here: inside ``stage()`` it is always "stage"."""
        return mode_here(self, name, args, kwargs)

    def _stages_here(self) -> bool:
        """Return whether a task sent now would be staged, on the outbox's alias or another one."""
        staged = around.get().staged
        return may_stage(self) if staged is None else bool(staged)


def make_stageable(app: Any) -> Any:
    """Make an app able to stage, and return it; the own calls of a plain app send as before."""
    app = getattr(app, "_get_current_object", lambda: app)()  # the app behind a proxy
    cls: Any = type(app)  # read once: another thread may change it meanwhile
    if not issubclass(cls, StagingMixin):

        def reduce(self: Any) -> Any:
            rebuild, (_, *rest) = cls.__reduce__(self)
            return rebuild, (cls, *rest)  # pickle it as the plain app that it was

        app.__class__ = type(
            cls.__name__,
            (StagingMixin, cls),
            {"stages_by_itself": False, "__module__": __name__, "__reduce__": reduce},
        )
    return app


_on_replace = Task.on_replace


@in_own_context
@wraps(_on_replace)
def _on_replace_at_once(task: Any, sig: Any) -> Any:
    # Celery marks the tasks that it sends for a replacement, but not those of a nested chain.
    with surrounded(is_replacing=not task.request.is_eager):
        return _on_replace(task, sig)


Task.on_replace = _on_replace_at_once  # type: ignore[method-assign, assignment]


_group: Any = group
_apply_tasks = _group._apply_tasks


@in_own_context
@wraps(_apply_tasks)
def _apply_tasks_of_all_apps(
    self: Any, tasks: Any, producer: Any = None, app: Any = None, *args: Any, **options: Any
) -> Iterator[Any]:
    # The producer of a plain app, which a group passes on, would send the tasks of other apps, too.
    app = app or self.app
    opened: Any = nullcontext(producer)
    if producer is None and not isinstance(app, StagingMixin) and _an_app_may_stage():
        opened = LazyProducer(app, strict=False)
    templates = Templates(ordering_key=around.get().ordering_key)
    tasks = ((_templated(each, templates), *rest) for each, *rest in tasks)
    with opened as producer:
        return iter([*_apply_tasks(self, tasks, producer, app, *args, **options)])


def _templated(signature: Any, templates: Templates) -> Any:
    return Grouped(signature, templates) if type(signature) is Signature else signature


_group._apply_tasks = _apply_tasks_of_all_apps


def _an_app_may_stage() -> bool:
    staging: list[Any] = staging_apps()
    return any(may_stage(app) for app in staging)


class _NoNativeDelay:
    connections = SimpleNamespace(connection=StagingProducer.connection)

    def __init__(self, app: Any) -> None:
        self._app = app

    def __getattr__(self, name: str) -> Any:
        return getattr(self._app.amqp.producer_pool, name)


def active_apps() -> list[Celery]:
    return list(_get_active_apps())


def celery_app(name: str) -> Celery | None:
    """Return the app of this name; if there are several, prefer one that stages by itself."""
    named = [app for app in active_apps() if (app.main or "") == name]
    return max(named, key=lambda app: getattr(app, "stages_by_itself", False), default=None)


def staging_apps() -> list[Celery]:
    """Return the Celery apps of this process that stage by themselves, by name."""
    staging = [app for app in active_apps() if getattr(app, "stages_by_itself", False)]
    return sorted(staging, key=lambda app: app.main or "")


def task_named(name: str, app: Celery | None = None) -> Task[Any, Any] | str:
    """Return the task of this name, with the options of its decorator, or else the name itself.

    If the app does not know the name, this imports the app's task modules, as a worker does at its
    start. The import may fail in a process that lacks the libraries of the workers.
    """
    sender: Any = app or current_app._get_current_object()  # type: ignore[attr-defined]
    if name not in sender.tasks:
        try:
            load_tasks(sender)
        except Exception as error:  # any error of the project's modules
            logger.warning("Task modules cannot be imported task=%s error=%s", name, error)
    return sender.tasks.get(name, name)  # type: ignore[no-any-return]


_loading = threading.RLock()
_loaded: WeakSet[Celery] = WeakSet()


def load_tasks(app: Celery) -> None:
    """Import the task modules of an app, once."""
    # A second thread waits here: else it would find half of the tasks, and stage others by name.
    with _loading:
        if app not in _loaded:
            _loaded.add(app)
            # Celery would run the system checks first, which query all databases since Django 6.1.
            before = os.environ.get("CELERY_SKIP_CHECKS", "")
            os.environ["CELERY_SKIP_CHECKS"] = "1"
            try:
                app.loader.import_default_modules()
            finally:
                os.environ["CELERY_SKIP_CHECKS"] = before


def _renew_locks() -> None:
    """Give a forked child locks that no thread holds: of Celery, of kombu, and ours.

    Each read of a kombu ``cached_property``, such as ``app.amqp``, takes a lock of the property,
    even if the value is there; so does a signal that has receivers, and the cached name of the
    host. A child that was forked while another thread of its parent held such a lock would wait for
    that thread for ever, inside an open transaction. What their locks guard are single assignments,
    which were made or are made again.
    """
    global _loading
    _loading = threading.RLock()
    _loaded.clear()
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] in ("celery", "kombu"):
            for value in list(getattr(module, "__dict__", {}).values()):
                _renew(value)


def _renew(value: Any) -> None:
    kind = type(value)  # isinstance() would evaluate a proxy of Celery's
    if issubclass(kind, Signal):
        value.lock = threading.Lock()
    elif issubclass(kind, type):
        each: Any
        for each in list(vars(value).values()):
            if issubclass(type(each), cached_property):
                each.lock = threading.RLock()
    elif kind is FunctionType and "mutex" in value.__code__.co_freevars:  # of kombu's memoize()
        cells = dict(zip(value.__code__.co_freevars, value.__closure__, strict=True))
        cells["mutex"].cell_contents = threading.Lock()


os.register_at_fork(after_in_child=_renew_locks)
