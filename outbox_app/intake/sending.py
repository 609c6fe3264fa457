"""Which calls stage and which go straight out: the mixin that replaces ``send_task`` of a Celery app.

=====================================================  ==========================================
where the call happens                                 what happens
=====================================================  ==========================================
inside ``atomic()`` on the outbox's alias              staged, in that transaction
outside any transaction                                ``OUTBOX["OUTSIDE"]``: send, stage or refuse
inside ``atomic()`` on another alias only              refused: it would not be atomic
explicit ``producer=`` or ``connection=``              sent: the caller asked for it
``retry()``, ``replace()``, the worker's follow-ups    sent: a rollback would lose them
=====================================================  ==========================================
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from celery import Celery
from celery.utils.quorum_queues import detect_quorum_queues
from django.db import connections

from ..conf import settings
from ..exceptions import NotAtomic
from . import limits
from .producer import StagingProducer, unless_staged
from .results import put_off_subscriptions
from .rows import collecting, outbox_alias


@dataclass(frozen=True, slots=True)
class Explicit:
    """The call is inside ``stage()`` or ``stage_many()``: everything it sends is staged."""

    using: str
    ordering_key: str


_explicit: ContextVar[Explicit | None] = ContextVar("outbox_app_explicit", default=None)
_staging_now: ContextVar[bool] = ContextVar("outbox_app_staging_now", default=False)


@contextmanager
def explicitly(*, using: str, ordering_key: str) -> Iterator[None]:
    """Stage everything that is sent inside, by whichever app, on the alias ``using``."""
    before = _explicit.get()
    _explicit.set(Explicit(using, ordering_key))
    try:
        yield
    finally:
        _explicit.set(before)


class StagingMixin:
    """Makes a Celery app stage. ``OutboxCelery`` is Celery with this mixin."""

    #: False for a plain app that was adopted by ``stage()``: its own ``delay()`` goes on sending.
    stages_by_itself = True

    def send_task(
        self,
        name: str,
        args: Any = None,
        kwargs: Any = None,
        countdown: Any = None,
        eta: Any = None,
        task_id: str | None = None,
        producer: Any = None,
        connection: Any = None,
        *rest: Any,
        ordering_key: str = "",
        using: str | None = None,
        **options: Any,
    ) -> Any:
        """Stage or send one task; takes what ``Celery.send_task`` takes, and two options more.

        Args:
            ordering_key: Jobs with one key leave in the order in which they were staged. Default:
                no order.
            using: Database alias to stage on. Default: the outbox's.

        Returns:
            An ``AsyncResult``, as from Celery.

        Raises:
            NotAtomic: A transaction is open, but not on the outbox's alias; or none is open and the
                setting OUTSIDE refuses that.
            InvalidJob, UnknownTask: The job could never be sent. The transaction stays usable.
        """
        producer = producer or options.pop("publisher", None)
        given = connection or (producer and not isinstance(producer, Postponed))
        alias = None if given else self._alias_to_stage(name, using, options)
        call = (name, args, kwargs, countdown, eta, task_id)
        if alias is None:
            if isinstance(producer, Postponed):
                producer = None
            return super().send_task(*call, producer, connection, *rest, **options)  # type: ignore[misc]

        limits.check_task(name, self)  # type: ignore[arg-type]
        limits.check_headers(options.get("headers"), name=name, task_id=task_id)
        explicit = _explicit.get()
        staging = StagingProducer(
            self,  # type: ignore[arg-type]
            using=alias,
            ordering_key=ordering_key or (explicit.ordering_key if explicit else ""),
            hold=self._hold_horizon() if eta or countdown else 0,
        )
        if not hasattr(self.amqp.send_task_message, "stages"):  # type: ignore[attr-defined]
            self.amqp.send_task_message = unless_staged(self.amqp.send_task_message)  # type: ignore[attr-defined]
        before = _staging_now.get()
        _staging_now.set(True)
        try:
            return super().send_task(*call, staging, None, *rest, **options)  # type: ignore[misc]
        finally:
            _staging_now.set(before)

    def producer_or_acquire(self, producer: Any = None) -> Any:
        """As Celery's; while staging, a stand-in whose tasks are staged together."""
        if producer is None and not _staging_now.get() and self._may_stage():
            return Postponed(self)
        return super().producer_or_acquire(producer)  # type: ignore[misc]

    default_producer = producer_or_acquire

    @property
    def producer_pool(self) -> Any:
        """As Celery's; while staging, one whose transport knows no native delayed delivery.

        Celery would freeze the delay into the routing key, and a job that was held would wait
        twice.
        """
        return _NoNativeDelay if _staging_now.get() else super().producer_pool  # type: ignore[misc]

    @property
    def backend(self) -> Any:
        """As Celery's, with subscriptions to results put off while staging."""
        return put_off_subscriptions(super().backend, self._stages_here)  # type: ignore[misc]

    def _alias_to_stage(self, name: str, using: str | None, options: dict[str, Any]) -> str | None:
        """Return the alias to stage on, or None to send."""
        if options.get("retries") or options.get("replaced_task_nesting"):
            return None
        explicit = _explicit.get()
        if explicit is not None:
            return using or explicit.using
        if not self.stages_by_itself:
            return None
        alias = using or outbox_alias()
        if connections[alias].in_atomic_block:
            return alias
        others = open_transactions()
        if others:
            raise NotAtomic(
                f"{name} was called inside atomic(using={others[0]!r}), but jobs are staged on "
                f"{alias!r}: it would not be atomic. Open atomic(using={alias!r}), or pass "
                f"using={others[0]!r} if that database has the outbox's tables and a drainer."
            )
        outside = settings().OUTSIDE
        # What a worker sends for a chain or a link carries its parent; a chord's callback does not,
        # so inside a worker nothing is refused.
        if outside == "send" or options.get("parent_id"):
            return None
        if outside == "refuse" and self.current_worker_task is None:  # type: ignore[attr-defined]
            raise NotAtomic(
                f"{name} was called outside a transaction, and OUTBOX['OUTSIDE'] is 'refuse'. "
                f"Open transaction.atomic(using={alias!r}), or pass producer= to send it at once."
            )
        return alias if outside == "stage" else None

    def _may_stage(self) -> bool:
        return _explicit.get() is not None or (
            self.stages_by_itself and (settings().OUTSIDE != "send" or bool(open_transactions()))
        )

    def _stages_here(self) -> bool:
        """Say whether a task sent now, without further options, would be staged."""
        return (
            _staging_now.get()
            or _explicit.get() is not None
            or (self.stages_by_itself and connections[outbox_alias()].in_atomic_block)
        )

    def _hold_horizon(self) -> float:
        transport = super().producer_pool.connections.connection.transport  # type: ignore[misc]
        native_delay, _ = detect_quorum_queues(self, transport.driver_type)
        return 0 if native_delay else settings().HOLD_HORIZON


class Postponed:
    """What ``producer_or_acquire()`` gives while staging: a group passes it on to each of its tasks.

    The tasks of the block are staged together when it ends. For anything else it is a real producer
    of the app's pool, acquired at first use.
    """

    def __init__(self, app: Any) -> None:
        self._app = app
        self._stack = ExitStack()
        self._real: Any = None

    def __enter__(self) -> Postponed:
        self._stack.enter_context(collecting())
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        if self._real is None:
            self._real = self._stack.enter_context(self._app.producer_pool.acquire(block=True))
        return getattr(self._real, name)


def open_transactions() -> list[str]:
    """Return the aliases on which this thread has a transaction open."""
    return [c.alias for c in connections.all(initialized_only=True) if c.in_atomic_block]


def adopt(app: Any) -> None:
    """Make a plain Celery app able to stage what ``stage()`` is given; its own calls go on sending."""
    if not isinstance(app, StagingMixin):
        cls = type(app)
        app.__class__ = type(
            cls.__name__, (StagingMixin, cls), {"stages_by_itself": False, "__module__": __name__}
        )


class _NoNativeDelay:
    class connections:
        class connection:
            class transport:
                driver_type = "outbox"


def celery_app(name: str) -> Celery | None:
    """Return the Celery app of this process whose ``main`` is ``name``, or None."""
    from celery._state import _get_active_apps

    return next((app for app in list(_get_active_apps()) if (app.main or "") == name), None)
