"""Templates: in bulk, the third job of a kind is made like the first two.

All messages of one task with one set of options are alike but for the id, the arguments, and what
follows from them. Celery makes the first two of a call (``stage_many``, a group), with all of its
hooks. If a template made of the first one gives, byte for byte, the second one as well, it makes
the others. Celery goes on to make them if it does not, if their time depends on the moment of the
call, or if a hook might see or change a message on its way (``_is_plain``).

Each job still gets Celery's check of its arguments, kombu's serializer and compression, the checks
of all that is its own, and the receivers of known tracers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from functools import partial
from json.encoder import encode_basestring_ascii as as_json
from types import FunctionType
from typing import TYPE_CHECKING, Any, NamedTuple
from uuid import uuid4

from celery.app import base
from celery.app.defaults import NAMESPACES
from celery.app.routes import MapRoute, Router
from celery.canvas import Signature
from celery.signals import after_task_publish, before_task_publish, task_sent
from celery.utils.saferepr import saferepr
from django.db.models.base import ModelState
from django.db.models.signals import post_init, pre_init
from kombu import Producer

from ..message import Message
from . import insert, validation
from .calls import surrounded
from .producer import LazyProducer, StagingProducer, encoded, is_tracer, quick_levels, quick_repr
from .results import remember_staged

if TYPE_CHECKING:
    from ...models import StagedJob

#: Kinds of jobs that one call remembers: those that came first are forgotten first.
KINDS = 100
#: Arguments of ``Producer.publish`` that are no properties of the message.
_NO_PROPERTIES = {"exchange", "routing_key", "serializer", "compression", "retry", "retry_policy"}
_NO_PROPERTIES |= {"delivery_mode", "declare", "headers", "timeout", "confirm_timeout"}
#: Options that each job may have for itself.
_OWN = ("task_id", "group_index", "ordering_key", "chord")
#: Types whose ``repr`` tells all of a value.
_SCALARS = frozenset((str, int, float, bool, bytes, type(None)))


class Job(NamedTuple):
    """What a job has for itself. Its id is "" until there is one."""

    args: Any
    kwargs: Any
    task_id: str
    group_index: int | None
    ordering_key: str
    chord: Any


class Templates:
    """The templates of one call that stages many jobs.

    Args:
        ordering_key: The key of the jobs that have none in their options.
    """

    def __init__(self, *, ordering_key: str) -> None:
        self.ordering_key = ordering_key
        #: By kind: the first job with its producer, then a template. None: Celery makes them all.
        self._known: dict[Any, tuple[Job, StagingProducer] | Template | None] = {}

    def stage(
        self,
        signature: Signature[Any],
        args: Any,
        kwargs: Any,
        options: Mapping[str, Any],
        by_celery: Callable[[], Any],
    ) -> None:
        """Stage a signature as its ``apply_async`` does; ``by_celery`` calls that."""
        batch = insert.open_batch()
        found = self._described(signature, args, kwargs, options) if batch else None
        if batch is None or found is None:
            by_celery()
            return
        kind, task, shared, job = found
        known = self._known.get(kind, ())
        if isinstance(known, Template):
            known.stage(job, batch)
            return
        batch.latest = None
        by_celery()
        if known is None:
            return
        if kind not in self._known and len(self._known) >= KINDS:
            del self._known[next(iter(self._known))]
        producer: Any = batch.latest
        if producer is None or not _is_plain(task, producer):
            self._known[kind] = None
        else:
            job = job._replace(task_id=producer.job.task_id)
            pair = (job, producer)
            self._known[kind] = Template.of(task, shared, known, pair) if known else pair

    def _described(
        self, signature: Signature[Any], args: Any, kwargs: Any, options: Mapping[str, Any]
    ) -> tuple[Any, Any, Mapping[str, Any], Job] | None:
        """Return the kind, the task, the common options and the job; None: Celery makes it."""
        if type(signature) is not Signature or not _is_own(signature.apply_async, "celery.canvas"):
            return None
        sig: Any = signature  # Celery's classes of types lack the attributes
        if args or kwargs or options:  # as in Signature.apply_async
            options = {name: value for name, value in options.items() if value is not None}
            args, kwargs, merged = sig._merge(args, kwargs, options)
        else:
            args, kwargs, merged = sig.args, sig.kwargs, sig.options
        try:
            task = sig.type
        except Exception:  # the app has no task of this name
            return None
        shared = merged
        if merged:
            shared = {name: value for name, value in merged.items() if name not in _OWN}
        seen = _seen(task.name)
        job = Job(
            args or (),
            kwargs or {},
            merged.get("task_id") or "",
            merged.get("group_index"),
            merged.get("ordering_key") or self.ordering_key,
            merged.get("chord"),
        )
        types = (type(job.args), type(job.kwargs), type(job.task_id), type(job.ordering_key))
        plain = types in _PLAIN_JOBS and type(job.group_index) in (int, type(None))
        if not plain or seen is None or not _tells_all(shared):
            return None
        kind = (
            task,
            repr(shared),
            seen,
            bool(job.ordering_key),
            job.group_index is None,
            id(job.chord),
        )
        return kind, task, shared, job


_PLAIN_JOBS = ((tuple, dict, str, str), (list, dict, str, str))


def _tells_all(value: Any) -> bool:
    """Return whether two values with one ``repr`` are the same for Celery."""
    kind = type(value)
    if kind in (list, tuple):
        return all(map(_tells_all, value))
    if kind is dict:
        return all(map(_tells_all, value)) and all(map(_tells_all, value.values()))
    return kind in _SCALARS


def _seen(task: str) -> bool | None:
    """Return whether known tracers see a message of a task; None: other receivers do."""
    if task_sent.receivers:
        return None
    before = before_task_publish.receivers and before_task_publish._live_receivers(task)  # type: ignore[attr-defined]
    if before and not all(map(is_tracer, before)):
        return None
    after = after_task_publish.receivers and after_task_publish._live_receivers(task)  # type: ignore[attr-defined]
    return bool(before) or any(map(is_tracer, after))


def _is_plain(task: Any, producer: StagingProducer) -> bool:
    """Return whether nothing but Celery's own code, and ours, makes the messages of a task."""
    from ...models import StagedJob

    app: Any = producer.app
    amqp: Any = app.amqp
    router: Any = amqp.router
    expected = [
        (task.apply_async, "celery.app.task"),
        (task.shadow_name, "celery.app.task"),
        (app.send_task, "outbox_app.jobs.staging.sending"),
        (producer.send_task, "celery.app.base"),
        (getattr(amqp.create_task_message, "wrapped", None), "celery.app.amqp"),
        (getattr(amqp.send_task_message, "wrapped", None), "celery.app.amqp"),
        (Producer.publish, "kombu.messaging"),
        (Producer._prepare, "kombu.messaging"),
    ]
    return (
        all(_is_own(function, module) for function, module in expected)
        and task._get_app() is app
        and getattr(task, "_dump_pydantic_arguments", None) is None
        and not task.name.startswith("celery.")  # their arguments may decide on the mode
        and type(router) is Router
        and all(type(route) is MapRoute for route in vars(router)["routes"])
        and not pre_init.has_listeners(StagedJob)
        and not post_init.has_listeners(StagedJob)
    )


#: Modules whose wrappers of Celery's functions let a staged message pass as it is.
_TRANSPARENT = ("outbox_app.jobs.context", "outbox_app.jobs.staging.detector")


def _is_own(function: Any, module: str) -> bool:
    """Return whether a function was written in a module: a wrapper in its place was not."""
    function = getattr(function, "__func__", function)
    while type(function) is FunctionType:  # ``wraps`` copies the name of the module
        name = function.__globals__["__name__"]
        if name not in _TRANSPARENT:
            return bool(name == module)
        function = function.__wrapped__  # type: ignore[attr-defined]
    return False


class Template:
    """Makes the jobs of one kind; ``of`` returns one that was compared with two of Celery's."""

    def __init__(
        self, task: Any, options: Mapping[str, Any], job: Job, producer: StagingProducer
    ) -> None:
        app: Any = producer.app
        # The first job keeps its chord, whose id is part of the kind.
        self.task, self.first, self.producer = task, job, producer
        self.adds_to_parent = options.get("add_to_parent", True)
        self.repr_sizes = app.amqp.argsrepr_maxsize, app.amqp.kwargsrepr_maxsize
        self.quick_levels, self.repr_levels = quick_levels(app), {}
        if "repr_maxlevels" in NAMESPACES["task"]:  # older Celery has no such setting
            self.repr_levels = {"maxlevels": app.conf.task_repr_maxlevels}
        self.fields = vars(producer.job).copy()
        route = app.amqp.router.lookup_route(task.name, (), {}, {}, task) or {}
        options = {**route, **options}
        #: Names of options and headers that were chosen, so they do not follow from the job.
        self.chosen = {*options, *(options.get("headers") or ())}
        self.chosen |= {name.removesuffix("repr") for name in options}  # as an event has them
        self.properties = {
            name: each for name, each in producer.options.items() if name not in _NO_PROPERTIES
        }
        self.pattern = self._pattern(job)

    @classmethod
    def of(
        cls,
        task: Any,
        options: Mapping[str, Any],
        first: tuple[Job, StagingProducer],
        second: tuple[Job, StagingProducer],
    ) -> Template | None:
        """Return the template that makes two messages as Celery has made them, if it does."""
        template, message = cls(task, options, *first), _before_tracers(first[1])
        headers, fields = message.headers, template.fields
        if headers["eta"] or headers["expires"] or headers["stamped_headers"]:
            return None
        if fields["available_at"] or fields["id"] or template.chosen & {"id", "content_type"}:
            return None
        for job, producer in (first, second):
            expected = {**vars(producer.job), "envelope": _before_tracers(producer).dumps()}
            made = vars(template.made(job))
            if any(made[name] != expected[name] for name in expected if name != "_state"):
                return None
        return template

    def stage(self, job: Job, batch: insert.StagedBatch) -> None:
        """Stage a job, with what Celery, kombu and ``StagingProducer`` do for it alone."""
        task, using = self.task, self.producer.using
        app: Any = self.producer.app
        if task.typing and (check := getattr(task, "__header__", None)):
            check(*job.args, **job.kwargs)
        if job.task_id:
            validation.check_id(job.task_id, app)
        else:
            job = job._replace(task_id=base.uuid())  # type: ignore[attr-defined]
        validation.check_name("ordering_key", job.ordering_key, empty=True)
        staged = self.made(job)
        with self._traced(staged, job) if _seen(task.name) else nullcontext():
            validation.check_message_size(staged)
            validation.check_storable(staged, "ordering_key", "task_id", using=using)
            batch.add([staged], using=using)
        remember_staged(job.task_id, using=using)
        if self.adds_to_parent and (parent := app.current_worker_task):
            result = task.AsyncResult(job.task_id)
            result.ignored = Message.loads(staged.envelope).headers["ignore_result"]
            parent.add_trail(result)

    def made(self, job: Job) -> StagedJob:
        """Return the row of a job."""
        options = self.producer.options
        body, _, encoding = self.producer._prepare(
            _body(job), options["serializer"], None, None, options["compression"], {}
        )
        values = {
            name: as_json(each) if isinstance(each, str) else each
            for name, each in self._values(job).items()
        }
        # Without __init__(), which would take a third of the time. No signal has a receiver.
        staged: Any = object.__new__(type(self.producer.job))
        vars(staged).update(
            self.fields,
            _state=ModelState(),
            task_id=job.task_id,
            ordering_key=job.ordering_key,
            shard=insert.shard_of_job(job.ordering_key, job.task_id),
            body=encoded(body, encoding),
            envelope=self.pattern % values,
        )
        return staged  # type: ignore[no-any-return]

    def _values(self, job: Job) -> dict[str, Any]:
        """Return what is in the envelope of a job alone."""
        args, kwargs = quick_repr(job.args, levels=self.quick_levels), "{}"
        if job.kwargs:
            kwargs = quick_repr(job.kwargs, levels=self.quick_levels)
        most_args, most_kwargs = self.repr_sizes
        if not args or len(args) >= most_args:
            args = saferepr(job.args, most_args, **self.repr_levels)
        if not kwargs or len(kwargs) >= most_kwargs:
            kwargs = saferepr(job.kwargs, most_kwargs, **self.repr_levels)
        return {"id": job.task_id, "args": args, "kwargs": kwargs, "index": job.group_index}

    def _pattern(self, job: Job) -> str:
        """Return the envelope with a place for each value that a job has alone."""
        message = _before_tracers(self.producer)
        values = self._values(job)
        marks = {name: uuid4().hex for name, each in values.items() if each is not None}
        places: list[tuple[dict[str, Any] | None, dict[str, str]]] = [
            (message.headers, {"id": "id", "root_id": "id", "group_index": "index"}),
            (message.headers, {"argsrepr": "args", "kwargsrepr": "kwargs"}),
            (message.properties, {"correlation_id": "id"}),
            (
                message.sent_event,
                {"uuid": "id", "root_id": "id", "args": "args", "kwargs": "kwargs"},
            ),
        ]
        for part, names in places:
            for name, of in names.items():
                if part and of in marks and name not in self.chosen and part[name] == values[of]:
                    part[name] = marks[of]
        text = message.dumps().replace("%", "%%")
        for name, mark in marks.items():
            text = text.replace(f'"{mark}"', f"%({name})s")
        return text

    @contextmanager
    def _traced(self, staged: StagedJob, job: Job) -> Iterator[None]:
        """Call the receivers of tracers as Celery does, around the staging of a row."""
        message, options = Message.loads(staged.envelope), self.producer.options
        compression = message.headers.pop("compression", None)
        facts = {name: options[name] for name in ("exchange", "routing_key")}
        facts |= {"body": _body(job), "headers": message.headers}
        properties = dict(self.properties)
        if "correlation_id" not in self.chosen:
            properties["correlation_id"] = job.task_id
        with surrounded(staged=self.task.name):
            before_task_publish.send(
                sender=self.task.name,
                declare=options["declare"],
                properties=properties,
                retry_policy=options["retry_policy"],
                **facts,
            )
            try:
                if compression:
                    message.headers["compression"] = compression
                staged.envelope = message.dumps()
                yield
            finally:
                after_task_publish.send(sender=self.task.name, **facts)


def _body(job: Job) -> Any:
    embed = {"callbacks": None, "errbacks": None, "chain": None, "chord": job.chord}
    return job.args, job.kwargs, embed


def _before_tracers(producer: StagingProducer) -> Message:
    """Return the message of a producer without the headers that tracers have added."""
    message = Message.loads(producer.job.envelope)
    names = {*producer.header_names, "compression"}
    message.headers = {name: each for name, each in message.headers.items() if name in names}
    return message


class Grouped(Signature[Any] if TYPE_CHECKING else Signature):  # type: ignore[misc]
    """A task of a group, which its group sends: by a template if there is one."""

    def __init__(self, signature: Any, templates: Templates) -> None:
        super().__init__(signature)  # shares its options
        self._app, self._type = signature._app, signature._type
        self._signature, self._templates = signature, templates

    def apply_async(self, args: Any = None, kwargs: Any = None, **options: Any) -> None:
        by_celery = partial(self._signature.apply_async, args, kwargs, **options)
        if isinstance(options.get("producer"), LazyProducer):
            del options["producer"]
        self._templates.stage(self._signature, args, kwargs, options, by_celery)
