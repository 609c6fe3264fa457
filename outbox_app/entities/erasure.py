"""Erases an entity: a person's right to be forgotten.

Request, answer and state of every version are emptied, and the row is removed. Version numbers,
names of commands and command ids stay, so nothing that is repeated late is executed. The first
transaction removes the row and ends the chain with a version that has no state: from then on the
entity does not exist, until a command creates it. Older versions are emptied after it, in batches;
a second run finishes what a crash has left. Copies elsewhere (archives, backups, projections,
events and jobs that handlers gave) are not reached.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from django.db import IntegrityError
from django.db.models import QuerySet

from ..aliases import log_alias
from ..conf import outbox_settings
from ..eventlog.heads import bump_versions
from ..eventlog.insert import insert
from ..eventlog.newevent import CheckedEvent, canonical, slice_of
from ..exceptions import DamagedEntity, EntityError, InvalidArgument, InvalidEvent, UnknownEntity
from ..process.wakeup import EVENTS, wake_after_commit
from ..signals import events_published
from .operations import locked, logger

#: Behind the type of the event of an erasure, and the key of the metadata.
ERASED = "erased"
#: Versions emptied at once.
BATCH_SIZE = 500


def erase(
    entity: Any,
    id: str,
    *,
    reason: str,
    by: str = "",
    using: str | None = None,
    write: Callable[[str], Any] = logger.info,
) -> int:
    """Forget what an entity was; return how many versions were emptied, 0 if it had been before.

    ``reason`` and ``by`` are kept in the metadata of the versions, and in the log.

    Raises:
        UnknownEntity: Nothing of it is kept.
        DamagedEntity: Its head is behind its versions. Repair it first.
        EntityError: Rows of other tables refer to it, or another transaction holds it for too long.
        InvalidArgument: There is no reason, or none that can be stored.
    """
    using = using or log_alias(entity.versions)
    if not reason.strip():
        raise InvalidArgument("An erasure needs a reason.")
    try:
        metadata, text = canonical("the reason", {ERASED: {"reason": reason, "by": by}})
    except InvalidEvent as error:
        raise InvalidArgument(str(error)) from None
    last = _end(entity, id, metadata, text, using=using)
    old: Any = QuerySet(entity.versions, using=using).filter(
        stream=id, version__lt=last, request_hash__isnull=False
    )
    empty = {"data": {}, "metadata": metadata, "request_hash": None, "response": None}
    versions = old.order_by("version").values_list("version", flat=True)
    emptied = reached = 0
    told = time.monotonic()
    while batch := list(versions.filter(version__gt=reached)[:BATCH_SIZE]):
        found = old.filter(version__gt=reached, version__lte=batch[-1])
        emptied += found.update(**empty, state=None)
        reached = batch[-1]
        if 0 < outbox_settings().PROGRESS_INTERVAL <= time.monotonic() - told:
            told = time.monotonic()
            write(f"erasing versions={emptied}")
    words = "erased type=%s id=%s versions=%s by=%s reason=%s"
    logger.warning(words, entity._meta.label, id, emptied, by, reason)
    return emptied


def _end(entity: Any, id: str, metadata: Any, text: str, *, using: str) -> int:
    """Remove the row, and end the chain with a version that has no state; return its number."""
    table, label = entity.versions._meta.db_table, entity._meta.label
    with locked(entity, id, using=using) as head:
        rows: Any = QuerySet(entity, using=using).filter(pk=id)
        versions: Any = QuerySet(entity.versions, using=using).filter(stream=id)
        newest = versions.order_by("-version").first()
        if newest is None and not rows.exists():
            raise UnknownEntity(f"Nothing of {label} {id!r} is kept on {using!r}.")
        if newest is not None and newest.version > head:
            raise DamagedEntity(
                f"The head of {label} {id!r} is at version {head}, and its versions end at "
                f"{newest.version}. Run first: manage.py outbox_entities verify {label} --repair"
            )
        try:
            removed, _ = rows.delete()
        except IntegrityError as error:
            raise EntityError(f"{label} {id!r} is not erased: {error}") from error
        if not removed and newest is not None and ERASED in newest.metadata:
            return int(newest.version)
        # A command that has read the row before finds the head moved, and is done anew.
        version = bump_versions(table, {id: 1}, {}, using=using)[id]
        row = entity.versions(
            stream=id,
            version=version,
            type=f"{entity._meta.model_name}.{ERASED}",
            data={},
            metadata=metadata,
            slice=slice_of(id),
            message_id=uuid4(),
            command_id=f"{ERASED}-{uuid4()}",
        )
        insert([CheckedEvent(row, "{}", text, repeatable=False)], entity.versions, using=using)
        events_published.send(entity.versions, using=using, events=[row])
        wake_after_commit(using, EVENTS)
    return version
