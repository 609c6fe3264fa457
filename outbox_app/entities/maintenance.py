"""The entity types of the project, and the erasure of an entity.

An erasure that was interrupted is run again: the rest of the versions is emptied. It leaves version
numbers, command names and command ids, so that a late repeat is not executed. Its first transaction
removes the row and adds a last version without a state: the entity no longer exists, until a
command creates it. An erasure does not reach copies elsewhere (archives, backups, projections,
events and jobs of handlers).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

from django.apps import apps
from django.db import IntegrityError, OperationalError, connections
from django.db.models import QuerySet

from ..database.lock_wait import atomic_with_lock_wait, is_conflict
from ..events.exceptions import InvalidEvent
from ..events.log.heads import bump_versions
from ..events.log.newevent import NewEvent, checked, require_storable
from ..events.log.publish import publish_checked
from ..exceptions import InvalidArgument
from ..process.foreground import throttled
from ..text import Write, get_logger
from .exceptions import DamagedEntity, EntityContended, EntityError, UnknownEntity
from .models import EntityRow, EntityVersion

logger = get_logger("outbox_app.entities")

#: Seconds to wait for the lock of an entity.
LOCK_SECONDS = 10
#: The suffix of the event type of an erasure, and its key in the metadata.
ERASED = "erased"
#: How many versions one statement empties.
BATCH_SIZE = 500


def declared_types() -> list[Any]:
    """Return all entity types of the project, sorted by label, validly declared or not."""
    models = [m for m in apps.get_models() if issubclass(m, EntityRow) and not m._meta.proxy]
    return sorted(models, key=lambda model: model._meta.label)


def entity_types() -> list[Any]:
    """Return the entity types whose ``versions`` are a log of entity versions, sorted by label."""
    logs = [(each, getattr(each, "versions", None)) for each in declared_types()]
    return [each for each, log in logs if isinstance(log, type) and issubclass(log, EntityVersion)]


def entity_named(name: str) -> Any:
    """Return the entity type with this label or table. Raises ``InvalidArgument``."""
    for entity in entity_types():
        if name in (entity._meta.label, entity._meta.label_lower, entity._meta.db_table):
            return entity
    known = ", ".join(entity._meta.label for entity in entity_types()) or "none"
    raise InvalidArgument(f"There is no entity type {name!r}. Known: {known}.")


def erase(
    entity: Any, id: str, *, reason: str, by: str = "", using: str, write: Write = logger.info
) -> int:
    """Erase an entity; return how many versions were emptied, 0 if it had been erased before.

    ``reason`` and ``by`` are stored in the metadata of the versions, and logged. Raises
    ``InvalidArgument`` for a reason that cannot be stored, and ``EntityError`` if the entity has
    no row or version, its head is behind its versions, or other rows or transactions hold it.
    """
    if not reason.strip():
        raise InvalidArgument("An erasure needs a reason.")
    metadata = {ERASED: {"reason": reason, "by": by}}
    last = _end(entity, id, metadata, using=using)
    old: Any = QuerySet(entity.versions, using=using).filter(stream=id, request_hash__isnull=False)
    emptied = 0
    tell = throttled(write)
    for first in range(1, last, BATCH_SIZE):
        batch = old.filter(version__gte=first, version__lt=min(first + BATCH_SIZE, last))
        emptied += batch.update(
            data={}, metadata=metadata, request_hash=None, response=None, state=None
        )
        tell(f"erasing versions={emptied}")
    words = "Entity erased type=%s id=%s versions=%s by=%s reason=%s"
    logger.warning(words, entity._meta.label, id, emptied, by, reason)
    return emptied


def _end(entity: Any, id: str, metadata: Any, *, using: str) -> int:
    """Remove the row, and add a last version without a state; return its number."""
    label = entity._meta.label
    try:
        event = NewEvent(id, f"{entity._meta.model_name}.{ERASED}", metadata=metadata)
        end = checked(event, entity.versions)
        require_storable([end], using=using)
    except InvalidEvent as error:
        raise InvalidArgument(str(error)) from None
    end.row.command_id = f"{ERASED}-{uuid4()}"  # type: ignore[attr-defined]
    with locked(entity, id, using=using) as (head, newest):
        if newest is not None and newest.version > head:
            raise DamagedEntity(
                f"The head of {label} {id!r} is at version {head}, but its newest version is "
                f"{newest.version}. Run first: manage.py outbox_entities verify {label} --repair"
            )
        try:
            removed, _ = QuerySet(entity, using=using).filter(pk=id).delete()
        except IntegrityError as error:
            raise EntityError(f"{label} {id!r} is not erased: {error}") from error
        if not removed and newest is None:
            raise UnknownEntity(f"{label} {id!r} has no row and no version on {using!r}.")
        if not removed and ERASED in newest.metadata:
            return int(newest.version)
        # A command that has read the row before this finds the head moved, and is repeated.
        [row] = publish_checked([end], entity.versions, {}, using=using)
    return row.version


@contextmanager
def locked(entity: Any, id: str, *, using: str) -> Iterator[tuple[int, Any]]:
    """Open a transaction in which no command changes the entity; yield head and newest version.

    A head that does not exist is inserted, at 0: its gap cannot be locked. Roll back to remove it.
    Raises ``EntityContended`` if another transaction holds the head for too long.
    """
    log, outermost = entity.versions, not connections[using].in_atomic_block
    try:
        with atomic_with_lock_wait(LOCK_SECONDS, using=using, read_committed=True):
            head = bump_versions(log._meta.db_table, {id: 0}, {}, using=using)[id]
            versions: Any = QuerySet(log, using=using).filter(stream=id)
            yield head, versions.order_by("-version").first()
    except OperationalError as error:
        if not outermost or not is_conflict(error):
            raise
        raise EntityContended(
            f"{entity._meta.label} {id!r} is locked by another transaction. Nothing was written: "
            "try again."
        ) from error
