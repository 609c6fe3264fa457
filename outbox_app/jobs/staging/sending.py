"""Which calls are staged and which are sent: the mixin that replaces ``Celery.send_task``.

=====================================================  ==========================================
where the call happens                                 what happens
=====================================================  ==========================================
inside ``atomic()`` on the outbox's alias              staged, in that transaction
outside any transaction                                ``OUTBOX["OUTSIDE"]``: send, stage or refuse
inside ``atomic()`` on another alias only              refused: it would not be atomic
autocommit off, outside ``atomic()``                   refused: it would be sent before the commit
``producer=``, ``connection=``; or mode not "stage"    sent: it was asked for (see ``modes``)
``retry()``, ``replace()``, the worker's follow-ups    sent: a rollback would lose them
=====================================================  ==========================================
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar
from functools import wraps
from inspect import signature
from types import SimpleNamespace
from typing import Any, NamedTuple

from celery import Celery
from celery._state import _get_active_apps  # type: ignore[attr-defined]
from celery.app import amqp as celery_amqp
from celery.app.task import Task
from celery.canvas import group
from django.apps import apps
from django.db import connections

from ...aliases import outbox_alias
from ...conf import outbox_settings
from ...database.transactions import is_atomic, is_in_test, lacks_autocommit, open_transactions
from ...exceptions import NotAtomic, StagingRefused
from ...text import get_logger
from ..context import let
from . import fork as fork  # renews locks
from . import validation
from .modes import Mode, is_by_hand, loaded_task, mode_of, shadow_mode
from .producer import LazyProducer, StagingProducer, or_staged, with_quick_reprs
from .results import is_chord_part, remember_staged, wrap_backend

logger = get_logger("outbox_app.shadow")

# Every hook on Celery. The code of each says why it exists:
#
#   this module         Celery.send_task, producer_or_acquire, producer_pool and backend; the class
#                       of a plain app that ``stage()`` was given; Task.on_replace and
#                       group._apply_tasks of all apps
#   results             on_task_call, on_chord_part_return, add_pending_result,
#                       remove_pending_result, wait_for_pending and iter_native of a result
#                       backend
#   producer            send_task_message and create_task_message of ``app.amqp``
#   message             outbox_configured_queues of ``app.amqp``
#   publish_signals     the class of after_task_publish and task_sent
#   outbox_app.celery   the ``…_on_commit`` methods of a task
#   detector            Celery.send_task and Task.apply_async of all apps, where DETECT is on

#: What ``Celery.send_task`` takes by position, after the name and the task's arguments.
_AFTER_ARGUMENTS = tuple(signature(Celery.send_task).parameters)[4:-1]
_OURS = ("ordering_key", "using", "immediate")

#: True while a worker sends the follow-ups of a task: links, chain steps, the body of a chord. If
#: this Celery has no such flag, all that a worker sends outside a transaction counts as follow-up.
_follow_up: ContextVar[bool] = getattr(
    celery_amqp, "_callback_publish_retry", ContextVar("outbox_app_follow_up", default=True)
)


class ForcedStaging(NamedTuple):
    """The call is inside ``stage()`` or ``stage_many()``: everything it sends is staged."""

    using: str = ""
    ordering_key: str = ""
    immediate: bool | None = None


_NOT_FORCED = ForcedStaging()
_forced = ContextVar("outbox_app_forced", default=_NOT_FORCED)
#: Inside ``send_task``: whether the call is staged.
_staging_now: ContextVar[bool | None] = ContextVar("outbox_app_staging_now", default=None)
#: Inside ``Task.replace()``, which raises when it has sent.
_replacing: ContextVar[bool] = ContextVar("outbox_app_replacing", default=False)


def force_staging(
    *, using: str, ordering_key: str, immediate: bool | None = None
) -> AbstractContextManager[None]:
    """Stage everything that any app sends inside the block, on the alias ``using``."""
    return let(_forced, ForcedStaging(using, ordering_key, immediate))


class StagingMixin:
    """Makes a Celery app stage. ``OutboxCelery`` is Celery with this mixin."""

    #: False for a plain app that ``stage()`` made stageable: its own ``delay()`` sends as before.
    stages_by_itself = True

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
        if getattr(loaded_task(self, name), "immediate", None):
            options.setdefault("immediate", False)  # else Celery takes the attribute for AMQP's
        by_hand = is_by_hand(options)
        task_args = args[0] if args else options.get("args")
        task_kwargs = args[1] if len(args) > 1 else options.get("kwargs")
        using = ours.get("using")
        mode = self.outbox_mode(name, task_args, task_kwargs)
        alias = None if by_hand else self._alias_to_stage(name, using, options, mode)
        if ours.get("ordering_key") and mode != "shadow":
            self._check_order(name, alias if mode == "stage" else None, options)
        record = None
        if alias is not None:
            options["producer"] = self._staging(name, ours, options, using=alias, mode=mode)
        elif mode == "shadow" and not by_hand:
            options["producer"] = record = self._recording(name, ours, options)
        send: Any = super().send_task  # type: ignore[misc]
        with let(_staging_now, alias is not None), record or nullcontext():
            result = send(name, *args, **options)
        if alias is not None and result is not None:  # a class in between may have sent nothing
            remember_staged(result.id, using=alias)
        return result

    def _staging(
        self, name: str, ours: dict[str, Any], options: dict[str, Any], *, using: str, mode: Mode
    ) -> StagingProducer:
        """Check the call, and return a producer that stages it."""
        self._check(name, options)
        amqp: Any = self.amqp  # type: ignore[attr-defined]
        if not hasattr(amqp.send_task_message, "stages"):
            amqp.send_task_message = or_staged(amqp.send_task_message)
            amqp.create_task_message = with_quick_reprs(amqp)
        return StagingProducer(
            self,  # type: ignore[arg-type]
            using=using,
            ordering_key=ours.get("ordering_key") or _forced.get().ordering_key,
            immediate=self._is_immediate(name, ours.get("immediate")),
            mode=mode,
        )

    def _recording(self, name: str, ours: dict[str, Any], options: dict[str, Any]) -> Any:
        """Return a producer that records what staging would do; None if it would send as well."""
        shadow, refused = shadow_mode(), ""
        try:
            using = ours.get("using") or outbox_alias()
            if not shadow.is_expected(name):
                alias = self._alias_to_stage(name, ours.get("using"), options, "stage")
                if alias is None or not is_atomic(alias):
                    return None
            self._check(name, options)
        except StagingRefused as error:
            refused = str(error)
        except Exception:
            logger.exception("Shadow mode failed task=%s", name)
            return None
        key = ours.get("ordering_key") or ""
        return shadow.ShadowProducer(self, name, using=using, ordering_key=key, refused=refused)

    def _check(self, name: str, options: dict[str, Any]) -> None:
        app: Any = self
        validation.check_name("task name", name)
        task_id = options.get("task_id")
        validation.check_headers(options.get("headers"), name=name, task_id=task_id, app=app)

    def producer_or_acquire(self, producer: Any = None) -> Any:
        """Like Celery's; while staging, return a stand-in that stages its tasks together."""
        if producer is None and self._may_stage():
            return LazyProducer(self, strict=bool(_forced.get().using))
        return super().producer_or_acquire(producer)  # type: ignore[misc]

    default_producer = producer_or_acquire

    @property
    def producer_pool(self) -> Any:
        """Like Celery's; while staging, a pool that seems to lack native delayed delivery.

        Celery would encode the delay in the routing key, and a held job would wait twice.
        """
        return _NoNativeDelay(self) if _staging_now.get() else super().producer_pool  # type: ignore[misc]

    @property
    def backend(self) -> Any:
        """Like Celery's, with subscriptions to results deferred while staging."""
        backend = super().backend  # type: ignore[misc]
        return wrap_backend(backend, self._stages_here) if apps.models_ready else backend

    def outbox_mode(self, name: str, args: Any = None, kwargs: Any = None) -> Mode:
        """Return the mode of a call made here: inside ``stage()`` it is always "stage"."""
        if _forced.get().using:
            return "stage"
        return mode_of(self, name, args, kwargs) if self._stages_calls() else "send"

    def _alias_to_stage(
        self, name: str, using: str | None, options: dict[str, Any], mode: Mode
    ) -> str | None:
        """Return the alias to stage on, or None to send."""
        forced = _forced.get().using
        if not forced and (not self._stages_calls() or comes_before_an_error(options)):
            return None
        alias = using or forced or outbox_alias()
        if mode != "stage":
            return alias if is_in_test(alias) else None  # no test needs a broker
        if is_atomic(alias) or alias == forced:
            return alias
        if self._follows_a_task(options):
            return alias if connections[alias].in_atomic_block else None
        return alias_outside(name, alias)

    def _is_immediate(self, name: str, asked: bool | None) -> bool:
        own = getattr(loaded_task(self, name), "immediate", None)
        settings = [asked, _forced.get().immediate, own, outbox_settings().IMMEDIATE]
        return next(each for each in settings if each is not None)

    def _follows_a_task(self, options: dict[str, Any]) -> bool:
        worker = self.current_worker_task  # type: ignore[attr-defined]
        follows = options.get("parent_id") or is_chord_part.get()
        return bool(follows or (worker and _follow_up.get()))

    def _check_order(self, name: str, alias: str | None, options: Any) -> None:
        """Refuse an ordering key if the call is sent: it would overtake staged jobs of the key.

        Tasks that a worker sends by itself are sent all the same, or the work would be lost.
        """
        by_worker = comes_before_an_error(options) or self._follows_a_task(options)
        if by_worker or not self._stages_calls():
            return
        in_order = _forced.get().using or outbox_settings().OUTSIDE == "stage"
        if not alias or not (in_order or is_atomic(alias)):
            raise NotAtomic(
                f"{name} was called with an ordering_key where it is sent at once, ahead of those "
                "that are staged with it. Open atomic() on the outbox's database, without "
                "producer= or connection=, for a task of mode 'stage', or leave the key out."
            )

    def _may_stage(self) -> bool:
        if _forced.get().using:
            return True
        if not self._stages_calls():
            return False
        # The outbox's connection counts even if nothing has used it yet.
        used = [connections[outbox_alias()], *connections.all(initialized_only=True)]
        outside = outbox_settings().OUTSIDE
        return outside != "send" or any(c.in_atomic_block or lacks_autocommit(c) for c in used)

    def _stages_here(self) -> bool:
        """Return whether a task sent now would be staged, on the outbox's alias or another one."""
        staging = _staging_now.get()
        return self._may_stage() if staging is None else staging

    def _stages_calls(self) -> bool:
        # Without django.setup() there is no outbox, and Celery's own calls work as before.
        return self.stages_by_itself and apps.models_ready


def alias_outside(name: str, alias: str) -> str | None:
    """Return the alias to stage on for a call outside its transactions, or None to send it.

    The call is refused if another transaction is open, with which its row would not be atomic.
    """
    outside = outbox_settings().OUTSIDE
    if lacks_autocommit(connections[alias]):
        if outside == "stage":
            return alias
        raise NotAtomic(
            f"{name} was called with autocommit off on {alias!r} and outside atomic(): it "
            f"would be sent before the commit. Open transaction.atomic(using={alias!r})."
        )
    if others := open_transactions():
        raise NotAtomic(
            f"{name} was called inside atomic(using={others[0]!r}), but jobs are staged on "
            f"{alias!r}: it would not be atomic. Open atomic(using={alias!r}), or call "
            f"apply_async(using={others[0]!r}) if that has the outbox's tables and a drainer."
        )
    if outside == "refuse":
        raise NotAtomic(
            f"{name} was called outside a transaction, and OUTBOX['OUTSIDE'] is 'refuse'. "
            f"Open transaction.atomic(using={alias!r}), or give apply_async() producer= to send it."
        )
    # In the transaction of a test, stage instead of sending, so that no test needs a broker.
    is_staged = outside == "stage" or connections[alias].in_atomic_block
    return alias if is_staged else None


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


def comes_before_an_error(options: Mapping[str, Any]) -> bool:
    """Return whether ``retry()`` or ``replace()`` sends: they raise next, which undoes a row."""
    return bool(options.get("retries") or _replacing.get())


_on_replace = Task.on_replace


@wraps(_on_replace)
def _on_replace_at_once(task: Any, sig: Any) -> Any:
    # Celery marks the tasks that it sends for a replacement, but not those of a nested chain.
    with let(_replacing, not task.request.is_eager):
        return _on_replace(task, sig)


Task.on_replace = _on_replace_at_once  # type: ignore[method-assign, assignment]


_group: Any = group
_apply_tasks = _group._apply_tasks


@wraps(_apply_tasks)
def _apply_tasks_of_all_apps(
    self: Any, tasks: Any, producer: Any = None, app: Any = None, *args: Any, **options: Any
) -> Iterator[Any]:
    # The producer of a plain app, which a group passes on, would send the tasks of other apps, too.
    app = app or self.app
    opened: Any = nullcontext(producer)
    if producer is None and not isinstance(app, StagingMixin) and _an_app_may_stage():
        opened = LazyProducer(app, strict=False)
    with opened as producer:
        yield from _apply_tasks(self, tasks, producer, app, *args, **options)


_group._apply_tasks = _apply_tasks_of_all_apps


def _an_app_may_stage() -> bool:
    staging: list[Any] = staging_apps()
    return any(app._may_stage() for app in staging)


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
