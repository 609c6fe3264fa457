"""Models that stage: ``class Order(OutboxMixin, models.Model)``.

``self.stage()`` stages on the instance's own database. Each ``save()`` and ``delete()``,
``QuerySet.delete()`` and cascade stages the jobs that the model declares with ``outbox =
[on_create("shop.tasks.send_receipt"), …]``, in one transaction with the row: both are committed, or
neither. Fixtures (``raw``) stage nothing. Neither do changes that send no signal:
``bulk_create()``, ``bulk_update()``, ``QuerySet.update()``, raw SQL and cascades of the database
itself; call ``stage_declared()`` for these. If a declared job is refused, the transaction is marked
for rollback, as Django does for a ``save()`` that fails half-way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeAlias, get_args

from celery.app.task import Task
from celery.canvas import Signature
from django.db import models, router, transaction
from django.db.models.signals import class_prepared, post_delete, post_save
from django.dispatch import receiver

from .database.transactions import require_atomic
from .exceptions import InvalidJob, OutboxError
from .jobs.staging.insert import batching
from .jobs.staging.sending import task_named
from .jobs.staging.stage import stage

if TYPE_CHECKING:
    from typing import Unpack

    from .typed import ModelOptions

Change = Literal["create", "update", "delete"]
Work: TypeAlias = "Task[Any, Any] | Signature[Any] | str | Callable[[Any], Any]"
When = Callable[[Any], bool]


@dataclass(frozen=True, slots=True, eq=False)
class Declared:
    """One entry of a model's ``outbox``: what is staged when an instance changes."""

    change: Change
    task: Work
    when: When | None
    ordered: bool
    options: Mapping[str, Any]

    def jobs(self, instance: models.Model) -> Iterator[tuple[Any, Sequence[Any] | None]]:
        """Yield the jobs to stage for an instance, each with the arguments to add."""
        if self.when is not None and not self.when(instance):
            return
        if isinstance(self.task, str | Signature | Task):
            if instance.pk is None:
                raise InvalidJob(
                    f"on_{self.change}() of {instance._meta.label}: a row has no primary key, "
                    "which is the task's argument. Save it first; MySQL returns none from "
                    "bulk_create(): read the rows again."
                )
            task: Any = self.task
            if isinstance(task, str):  # found late: tasks import models, which need not import them
                task = task_named(task, self.options.get("app"))
            elif isinstance(task, Signature):
                task = task.clone()  # a chain remembers the ids of its last run
            yield task, (instance.pk,)
        else:
            made = self.task(instance)
            for job in made if isinstance(made, list | tuple) else [made]:
                if isinstance(job, Signature):
                    yield job, None
                elif job is not None:
                    raise InvalidJob(
                        f"on_{self.change}() of {instance._meta.label}: the callable must return a "
                        f"signature, a list of them or None; it returned {job!r}. Write task.s(…)."
                    )


def on_create(
    task: Work, *, when: When | None = None, ordered: bool = False, **options: Unpack[ModelOptions]
) -> Declared:
    """Declare the work to stage when a row is created.

    Args:
        task: A task name, a task or a signature, called with the primary key; or a callable that
            takes the instance and returns a signature, a list of them, or None for nothing.
        when: A callable that takes the instance; if it returns False, nothing is staged.
        ordered: The jobs of one row leave in the order in which they were staged.
        **options: Options of ``outbox_app.stage``.
    """
    return Declared("create", task, when, ordered, options)


def on_update(
    task: Work, *, when: When | None = None, ordered: bool = False, **options: Unpack[ModelOptions]
) -> Declared:
    """Declare the work to stage when a row is saved again; takes the arguments of ``on_create``."""
    return Declared("update", task, when, ordered, options)


def on_delete(
    task: Work, *, when: When | None = None, ordered: bool = False, **options: Unpack[ModelOptions]
) -> Declared:
    """Declare the work to stage when a row is deleted; takes the arguments of ``on_create``."""
    return Declared("delete", task, when, ordered, options)


def declared(model: type[models.Model], *changes: Change) -> list[Declared]:
    """Return a model's declarations for the given changes; leave out anything else."""
    declarations = getattr(model, "outbox", ())
    if not isinstance(declarations, list | tuple):
        return []
    return [d for d in declarations if isinstance(d, Declared) and d.change in changes]


class OutboxMixin(models.Model):
    """Gives a model ``self.stage()``, and stages the jobs that it declares."""

    #: Results of ``on_create()``, ``on_update()`` and ``on_delete()``; inherited as usual.
    outbox: ClassVar[Sequence[Declared]] = ()

    class Meta:
        abstract = True

    def stage(
        self,
        task: Task[Any, Any] | Signature[Any] | str,
        args: Sequence[Any] | None = None,
        kwargs: Mapping[str, Any] | None = None,
        *,
        ordered: bool = False,
        **options: Unpack[ModelOptions],
    ) -> Any:
        """Stage a job on the database that this instance is saved to.

        Args:
            task, args, kwargs: As for ``outbox_app.stage``.
            ordered: The jobs of one row leave in the order in which they were staged: their
                ordering key is ``app_label.model:pk``.
            **options: Options of ``outbox_app.stage``.

        Returns:
            An ``AsyncResult``, or a ``GroupResult`` for a group.

        Raises:
            NotAtomic: No transaction is open on that database.
            InvalidJob: The job could never be sent, or there is no primary key to order by.
        """
        options.setdefault("using", alias_of(self))
        if ordered:
            without = "its jobs have no order. Save it before you stage with ordered=True."
            options["ordering_key"] = key_of(self, InvalidJob, without)
        return stage(task, args, kwargs, **options)

    @classmethod
    def stage_declared(
        cls, change: Change, instances: Iterable[models.Model], *, using: str | None = None
    ) -> int:
        """Stage the jobs declared for a change that sent no signal, all of them or none.

        Call it in the transaction of ``bulk_create()`` (``"create"``), of ``bulk_update()`` or
        ``QuerySet.update()`` (``"update"``), or of a raw deletion (``"delete"``). It writes one
        INSERT per thousand jobs.

        Args:
            change: "create", "update" or "delete".
            instances: The changed instances, all of one database, for example a queryset.
            using: Database alias. Default: that of the first instance.

        Returns:
            How many jobs were staged.

        Raises:
            NotAtomic: No transaction is open on the alias.
            InvalidJob: A job could never be sent.
            ValueError: ``change`` is unknown.
        """
        if change not in get_args(Change):
            raise ValueError(f"change must be one of {get_args(Change)}; got {change!r}.")
        rest = iter(instances)
        first = next(rest, None)
        if first is None:
            return 0
        using = using or alias_of(first)
        require_atomic("stage_declared()", using=using)
        with transaction.atomic(using=using), batching(streaming=True):
            return sum(
                _stage(instance, declared(cls, change), using=using)
                for instance in chain([first], rest)
            )

    def save_base(
        self,
        raw: bool = False,
        force_insert: Any = False,
        force_update: bool = False,
        using: str | None = None,
        update_fields: Iterable[str] | None = None,
    ) -> None:
        """Save as Django does, with the row and its declared jobs in one transaction."""
        using = using or alias_of(self)
        arguments = (raw, force_insert, force_update, using, update_fields)
        if not declared(type(self), "create", "update"):
            return super().save_base(*arguments)
        # In autocommit the row would be committed before post_save stages jobs. No savepoint: it
        # would cost two statements, and a caller who catches the refusal of a job and continues in
        # the same transaction must not commit the row without the job.
        with transaction.atomic(using=using, savepoint=False):
            super().save_base(*arguments)

    save_base.alters_data = True  # type: ignore[attr-defined]


def alias_of(instance: models.Model) -> str:
    """Return the alias that ``instance.save()`` writes to."""
    return router.db_for_write(type(instance), instance=instance)


def key_of(instance: OutboxMixin, refusal: type[OutboxError], without: str) -> str:
    """Return ``app_label.model:pk``, the same for every class through which a row may be saved.

    Proxies count as their model, children in multi-table inheritance as the uppermost parent that
    has the mixin. If there is no primary key yet, raise ``refusal``; its message ends with
    ``without``.
    """
    family = _family(type(instance))
    meta = next((m for m in reversed(family) if issubclass(m, OutboxMixin)), family[0])._meta
    if not instance._is_pk_set(meta):  # type: ignore[attr-defined]
        raise refusal(f"This {instance._meta.label} has no primary key yet, so {without}")
    # As read from the database: a form may give "7" for 7. repr() writes parts of composite keys.
    key = [field.to_python(getattr(instance, field.attname)) for field in meta.pk_fields]
    return f"{meta.label_lower}:{key[0] if len(key) == 1 else tuple(key)}"


def _family(model: type[models.Model]) -> list[type[models.Model]]:
    """Return the model that has the table, and its parents in multi-table inheritance."""
    concrete = model._meta.concrete_model or model
    return [concrete, *concrete._meta.all_parents]


@receiver(class_prepared, dispatch_uid="outbox_app.mixin")
def _connect(sender: type[models.Model], **kwargs: Any) -> None:
    # With a receiver Django deletes row by row, so connect none without a declaration.
    if issubclass(sender, OutboxMixin):
        if declared(sender, "create", "update"):
            post_save.connect(_saved, sender=sender)
        if declared(sender, "delete"):
            post_delete.connect(_deleted, sender=sender)


def _saved(instance: Any, created: bool, raw: bool, using: str, **kwargs: Any) -> None:
    if not raw:
        _stage(instance, declared(type(instance), "create" if created else "update"), using=using)


def _deleted(sender: type[models.Model], instance: Any, using: str, **kwargs: Any) -> None:
    # In multi-table inheritance Django deletes the parents' rows too, with a signal each. The jobs
    # that a parent declares are staged once, by the parent's own signal.
    theirs = [d for parent in _family(sender)[1:] for d in declared(parent, "delete")]
    own = [d for d in declared(sender, "delete") if d not in theirs]
    _stage(instance, own, using=using)


def _stage(instance: Any, declarations: Iterable[Declared], *, using: str) -> int:
    count = 0
    with batching():
        for declaration in declarations:
            options = {"using": using, **declaration.options}
            for task, args in declaration.jobs(instance):
                OutboxMixin.stage(instance, task, args, ordered=declaration.ordered, **options)
                count += 1
    return count
