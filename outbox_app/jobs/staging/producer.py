"""The boundary: the stand-ins for kombu's producer, at which a finished message becomes a row.

Celery ends every send in ``producer.publish(body, exchange=…, headers=…, …)``. ``StagingProducer``
is a kombu producer that does all that kombu does (serialize, compress, set the delivery mode) and
then writes a row where kombu would write to a channel. It contacts no broker, and returns as kombu
does: no exception passes through functions that tracing tools wrap. The drain, which really
publishes, sends ``after_task_publish`` (but see ``_PublishSignal``) and the ``task-sent`` event.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from celery import Celery
from celery.signals import after_task_publish, task_sent
from celery.utils.dispatch import Signal
from celery.utils.quorum_queues import detect_quorum_queues
from kombu import Producer, Queue

from ...conf import outbox_settings
from ...exceptions import InvalidJob, NotAtomic
from ..message import Message, describe
from . import insert, validation
from .calls import around

if TYPE_CHECKING:  # a project's celery.py is imported before Django's models may be
    from ...models import StagedJob


class StagingProducer(Producer):
    """Stages the one message that is published through it."""

    def __init__(
        self,
        app: Celery,
        *,
        using: str,
        ordering_key: str,
        immediate: bool = False,
        mode: str = "stage",
        receipt: int | None = None,
    ) -> None:
        super().__init__(None)  # type: ignore[arg-type]
        self.app = app
        self.using = using
        self.ordering_key = ordering_key
        self.immediate = immediate
        self.mode = mode
        self.receipt = receipt
        self.task = ""
        self.sent_event: dict[str, Any] | None = None
        #: Queues that the drain declares besides the job's own.
        self.also_declare: list[Any] = []
        #: What templates look at: Celery's ``send_task``, the names of all headers but those that
        #: tracers add, and the message that was published, with the row that it became.
        self.send_task: Any = None
        self.header_names: list[str] = []
        self.options: dict[str, Any] = {}
        self.job: Any = None

    #: The parts of a connection that are used while Celery sends: kombu wraps errors, Sentry reads
    #: the type.
    connection: Any = SimpleNamespace(
        _reraise_as_library_errors=nullcontext, transport=SimpleNamespace(driver_type="outbox")
    )

    def publish(self, body: Any, **options: Any) -> None:  # type: ignore[override]
        """Stage one message; takes the arguments of ``kombu.Producer.publish``."""
        try:
            self.job, self.options = self.job_of(body, **options), options
            insert.add(self.job, using=self.using, by=self)
        except BaseException:
            # Celery sends this signal only after a publish, but the span of a tracer has to end.
            message = {name: options.get(name) for name in ("headers", "exchange", "routing_key")}
            after_task_publish.send(sender=self.task, body=body, **message)
            raise

    def job_of(self, body: Any, **options: Any) -> StagedJob:
        """Return the job for a message, checked and not written yet."""
        if isinstance(body, dict):
            raise InvalidJob(
                "A message of task_protocol = 1 has its times in the body, so the outbox cannot "
                f"hold it ({self.task}). Set task_protocol = 2, Celery's default."
            )
        return super().publish(body, **options)  # type: ignore[return-value]

    def _publish(  # type: ignore[override]
        self,
        body: Any,
        priority: int | None,
        content_type: str,
        content_encoding: str,
        headers: dict[str, Any],
        properties: dict[str, Any],
        routing_key: str,
        mandatory: bool,
        immediate: bool,
        exchange: str,
        declare: list[Any],
        *ignored: Any,
    ) -> StagedJob:
        from ...models import StagedJob

        message = Message(
            exchange=exchange,
            routing_key=routing_key,
            headers=headers,
            properties=properties,
            priority=priority,
            content_type=content_type,
            content_encoding=content_encoding,
            expires=headers.get("expires"),
            sent_event=self.sent_event,
        )
        if message.expires:
            properties.pop("expiration", None)
        elif "expiration" in properties:  # kombu has made milliseconds of it, and will do so again
            properties["expiration"] = int(properties["expiration"]) / 1000
        validation.check_priority(priority, self.app)
        task_id = validation.check_id(
            headers.get("id") or properties.get("correlation_id") or "", self.app
        )
        job = StagedJob(
            app=self.app.main or "",
            task=self.task,
            task_id=task_id,
            ordering_key=self.ordering_key,
            body=encoded(body, content_encoding),
            receipt=self.receipt,
        )
        try:
            message.declare = [describe(each, self.app) for each in [*declare, *self.also_declare]]
            queues = [each.name for each in declare if isinstance(each, Queue)]
            job.queue = queues[0] if queues else routing_key
            job.envelope = message.dumps()
            eta = validation.moment_of("eta", headers.get("eta"), self.app)
            validation.moment_of("expires", message.expires, self.app)
        except (TypeError, ValueError) as error:
            raise InvalidJob(f"The message of {job} cannot be stored: {error}") from error
        held = self.receipt is not None
        job.available_at = held_until(eta, self.app, using=self.using, until_due=held)
        if self.immediate and not self.ordering_key and eta is None:
            job.is_immediate = True
        validation.check_job(job, message, self.app, eta=eta, using=self.using)
        job.shard = insert.shard_of_job(self.ordering_key, task_id)
        job.mode = self.mode
        return job


def held_until(
    eta: datetime | None, app: Any, *, using: str, until_due: bool = False
) -> datetime | None:
    """Return the time for ``available_at`` until which a job is held; None: a worker holds it.

    With quorum queues no worker can hold it, so the row is held however near the time is. So is,
    with ``until_due``, a job with a receipt: its limit begins when it is sent.
    """
    from ...database.clock import due_at

    if eta is None:
        return None
    driver_type = app.amqp.producer_pool.connections.connection.transport.driver_type
    native_delay, _ = detect_quorum_queues(app, driver_type)
    horizon = timedelta(seconds=outbox_settings().HOLD_HORIZON)
    if native_delay or until_due:
        horizon = timedelta()
    return due_at(eta, using=using) if eta - datetime.now(UTC) > horizon else None


def or_staged(send: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap ``app.amqp.send_task_message``: when staging, the drain sends signals and events."""

    def send_or_stage(producer: Any, name: str, message: Any, **options: Any) -> Any:
        if not isinstance(producer, StagingProducer):
            return send(producer, name, message, **options)
        producer.task, producer.sent_event = name, message.sent_event or producer.sent_event
        producer.header_names = [*message.headers, *(options.get("headers") or ())]
        options["retry"] = False  # a retry would need a real connection
        return send(producer, name, message._replace(sent_event=None), **options)

    send_or_stage.wrapped = send  # type: ignore[attr-defined]
    return send_or_stage


#: Modules of receivers that close at ``after_task_publish`` the span that they have opened before.
PAIRED = ("opentelemetry.instrumentation.celery", "ddtrace.contrib")


def is_tracer(receiver: Any) -> bool:
    """Return whether a receiver of a signal belongs to a tracer of ``PAIRED``."""
    return (getattr(receiver, "__module__", None) or "").startswith(PAIRED)


class _PublishSignal(Signal):
    """Lets staging reach some receivers of ``after_task_publish``, and the drain all others.

    OpenTelemetry and ddtrace open a span at ``before_task_publish``, which staging fires. If only
    the drain fired the other signal, all that the request does after staging would become part of
    the span. Celery's own code fires it, and runs to its end: tools that trace it would report an
    exception as an error. So receivers are left out here, for one task, in one thread or greenlet.
    """

    def _live_receivers(self, sender: Any) -> list[Any]:
        live: list[Any] = super()._live_receivers(sender)  # type: ignore[misc]
        here = around.get()
        if not sender or sender not in (here.staged, here.drained):
            return live
        return [each for each in live if is_tracer(each) == (sender == here.staged)]


for _signal in (after_task_publish, task_sent):
    _signal.__class__ = _PublishSignal


def with_quick_reprs(amqp: Any) -> Callable[..., Any]:
    """Wrap ``app.amqp.create_task_message``, which spends a quarter of its time on reprs."""
    create, levels = amqp.create_task_message, quick_levels(amqp.app)

    def create_message(
        task_id: str, name: str, args: Any = None, kwargs: Any = None, *rest: Any, **options: Any
    ) -> Any:
        for field, value, size in (
            ("argsrepr", args or (), amqp.argsrepr_maxsize),
            ("kwargsrepr", kwargs or {}, amqp.kwargsrepr_maxsize),
        ):
            if options.get(field) is None:
                text = quick_repr(value, levels=levels)
                options[field] = text if text and len(text) < size else None
        return create(task_id, name, args, kwargs, *rest, **options)

    create_message.wrapped = create  # type: ignore[attr-defined]
    return create_message


def quick_levels(app: Any) -> int:
    return min(app.conf.get("task_repr_maxlevels", 3) or 3, 3)


def quick_repr(value: Any, *, levels: int) -> str:
    """Return what Celery's ``saferepr`` returns, or "" if the value is long or of other types.

    The two are equal as long as the text is shorter than the limit of ``saferepr``.
    """
    kind = type(value)
    if kind is str:
        return "'" + value.replace("'", "\\'") + "'" if len(value) < 1000 else ""
    if value is None or kind in (int, bool, float):
        return str(value)
    if kind not in (list, tuple, dict) or levels < 1 or len(value) > 50:
        return ""
    parts = [quick_repr(each, levels=levels - 1) for each in value]
    if kind is dict:
        values = [quick_repr(each, levels=levels - 1) for each in value.values()]
        pairs = zip(parts, values, strict=True)
        parts = [f"{key}: {each}" if key and each else "" for key, each in pairs]
    if not all(parts):
        return ""
    text = ", ".join(parts)
    if kind is tuple:
        return f"({text},)" if len(parts) == 1 else f"({text})"
    return f"[{text}]" if kind is list else f"{{{text}}}"


class LazyProducer:
    """What ``producer_or_acquire()`` returns while staging: a group passes it to all of its tasks.

    The tasks of the block are staged together when it ends. For any other use it acquires a real
    producer of the app's pool; with ``strict`` any other use is refused.
    """

    def __init__(self, app: Any, *, strict: bool) -> None:
        self._app = app
        self._strict = strict
        self._stack = ExitStack()
        self._real: Any = None

    def __enter__(self) -> LazyProducer:
        self._stack.enter_context(insert.batching())
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def __getattr__(self, name: str) -> Any:
        if self._strict:
            raise NotAtomic(
                f"stage() was given a canvas of Celery app {self._app.main!r} with a task of "
                "another app, which would be sent at once. Stage the tasks of each app apart."
            )
        if self._real is None:
            self._real = self._stack.enter_context(Celery.producer_or_acquire(self._app))
        return getattr(self._real, name)


def encoded(body: Any, encoding: str | None) -> bytes:
    if isinstance(body, str):
        return body.encode("utf-8" if encoding in (None, "", "binary") else encoding)
    return bytes(body)
