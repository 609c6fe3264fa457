"""What type checkers see of tasks, ``shared_task`` and the options of ``stage()``.

There is no such module at run time.

A call has the options of Celery's calls and those that the outbox adds, and no other: a checker
finds one that is misspelt. It works with celery-types, and without, when Celery is untyped.
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import (
    Any,
    Concatenate,
    Generic,
    Literal,
    ParamSpec,
    TypedDict,
    TypeVar,
    Unpack,
    overload,
)

from celery import Celery
from celery.app.task import Task
from celery.canvas import Signature
from celery.contrib.django.task import DjangoTask
from celery.result import AsyncResult
from kombu import Connection, Exchange, Producer, Queue

_P = ParamSpec("_P")
_R_co = TypeVar("_R_co", covariant=True)
_T = TypeVar("_T", bound=Task[Any, Any])

class CeleryOptions(TypedDict, total=False):
    """Options of Celery's ``apply_async()``, and of kombu's ``publish()``."""

    task_id: str | None
    producer: Producer | None
    publisher: Producer | None
    connection: Connection | None
    link: Signature[Any] | list[Signature[Any]] | None
    link_error: Signature[Any] | list[Signature[Any]] | None
    shadow: str | None
    countdown: float | None
    eta: datetime | None
    expires: float | datetime | None
    retry: bool
    retry_policy: Mapping[str, Any] | None
    queue: str | Queue | None
    exchange: str | Exchange | None
    routing_key: str | None
    priority: int | None
    serializer: str | None
    compression: str | None
    add_to_parent: bool
    headers: Mapping[str, Any] | None
    ignore_result: bool
    time_limit: float | None
    soft_time_limit: float | None
    reply_to: str | None
    root_id: str | None
    parent_id: str | None
    delivery_mode: int | str | None
    mandatory: bool
    expiration: float | None
    timeout: float | None

class CallOptions(CeleryOptions, total=False):
    """Options of ``apply_async()``."""

    ordering_key: str
    using: str | None
    immediate: bool | None

class EntityOptions(CeleryOptions, total=False):
    """Options of ``stage()`` of an entity, which stages on its own database."""

    ordering_key: str
    immediate: bool | None
    app: Celery[Any] | None

class ModelOptions(EntityOptions, total=False):
    """Options of ``stage()`` of a model, and of what it declares."""

    using: str | None

class TaskOptions(TypedDict, total=False):
    """Options of a declaration of a task."""

    # of outbox_app
    immediate: bool
    outbox: Literal["stage", "send", "shadow"]
    receipt: int
    # of Celery
    name: str
    serializer: str
    compression: str
    queue: str
    priority: int | None
    expires: float | datetime | None
    autoretry_for: Sequence[type[BaseException]]
    dont_autoretry_for: Sequence[type[BaseException]]
    max_retries: int | None
    default_retry_delay: float
    retry_kwargs: dict[str, Any]
    retry_backoff: bool | float
    retry_backoff_max: float
    retry_jitter: bool
    throws: tuple[type[Exception], ...]
    acks_late: bool
    acks_on_failure_or_timeout: bool
    reject_on_worker_lost: bool
    ignore_result: bool
    store_errors_even_if_ignored: bool
    track_started: bool
    time_limit: float | None
    soft_time_limit: float | None
    rate_limit: str | int | None
    typing: bool
    trail: bool
    send_events: bool
    resultrepr_maxsize: int
    autoregister: bool
    abstract: bool
    pydantic: bool
    pydantic_strict: bool

class TypedTask(DjangoTask[_P, _R_co], Generic[_P, _R_co]):
    def __call__(self, *args: _P.args, **kwargs: _P.kwargs) -> _R_co: ...
    def delay(self, *args: _P.args, **kwargs: _P.kwargs) -> AsyncResult[_R_co]: ...
    def apply_async(  # type: ignore[override]
        self,
        args: Sequence[Any] | None = ...,
        kwargs: Mapping[str, Any] | None = ...,
        **options: Unpack[CallOptions],
    ) -> AsyncResult[_R_co]: ...
    def delay_on_commit(self, *args: _P.args, **kwargs: _P.kwargs) -> None: ...  # type: ignore[override]
    def apply_async_on_commit(  # type: ignore[override]
        self,
        args: Sequence[Any] | None = ...,
        kwargs: Mapping[str, Any] | None = ...,
        **options: Unpack[CallOptions],
    ) -> None: ...

@overload
def shared_task(fun: Callable[_P, _R_co], /) -> TypedTask[_P, _R_co]: ...
@overload
def shared_task(
    *, base: type[_T], bind: bool = ..., **options: Any
) -> Callable[[Callable[..., Any]], _T]: ...
@overload
def shared_task(
    *, bind: Literal[True], **options: Unpack[TaskOptions]
) -> Callable[[Callable[Concatenate[Any, _P], _R_co]], TypedTask[_P, _R_co]]: ...
@overload
def shared_task(
    *, bind: Literal[False] = ..., **options: Unpack[TaskOptions]
) -> Callable[[Callable[_P, _R_co]], TypedTask[_P, _R_co]]: ...
