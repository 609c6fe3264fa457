"""Compares the rows, stream heads and newest versions of entities; repairs from the versions.

Heads are read in batches, in the order of their streams, with the rows and newest versions that
belong to them; then rows and versions that have no head. Commands continue meanwhile: an entity
that looks different is read again with its head locked, and is reported if it still differs. Some
or all versions may have been pruned: only the others are compared. An entity without a row is sound
if its newest version has no state: its creation was rejected, or it was erased.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from copy import deepcopy
from typing import Any

from django.db import OperationalError, transaction
from django.db.models import OuterRef, QuerySet, Subquery

from ..events.log.window import TOMBSTONE
from ..events.models import StreamHead
from ..process.foreground import throttled
from ..text import Write
from .declaration import spec_of
from .handlers import derived_columns
from .maintenance import locked

#: How many entities one batch compares.
BATCH_SIZE = 500
#: The result of a repair that cannot know what is right.
LEFT = "left as it is"
#: What differs: "head", "row" (its existence), "version" or "state" of the row; and how.
Fault = tuple[str, str]


def verify(entity: Any, *, repair: bool, using: str, write: Write) -> int:
    """Compare rows, heads and newest versions of a type; return how many differences are left.

    With ``repair`` the row or the head is written from the newest version, with the head locked.
    Raises ``EntityContended`` if another transaction holds an entity for too long.
    """
    label, begun, tell = entity._meta.label, time.monotonic(), throttled(write)
    entities = differences = repaired = 0
    for count, suspects in _batches(entity, using):
        entities += count
        for id in suspects:
            faults, done = _settle(entity, id, repair, using)
            differences += bool(faults)
            repaired += bool(done) and not done.startswith(LEFT)
            if faults:
                listed = "; ".join([*(text for _, text in faults), *filter(None, [done])])
                write(f"difference type={label} id={id!r}: {listed}")
        tell(f"verifying type={label} entities={entities} differences={differences}")
    write(
        f"verified type={label} entities={entities} differences={differences} "
        f"repaired={repaired} database={using} seconds={time.monotonic() - begun:.1f}"
    )
    return differences - repaired


def differences(entity: Any, *, using: str) -> Iterator[tuple[str, Fault]]:
    """Yield each difference with its entity's id. Raises ``EntityContended``, as ``verify``."""
    for _, suspects in _batches(entity, using):
        for id in suspects:
            yield from ((id, fault) for fault in _settle(entity, id, False, using)[0])


def _batches(entity: Any, using: str) -> Iterator[tuple[int, list[str]]]:
    """Yield, for each batch, its number of entities and the ids that look different."""
    rows: Any = QuerySet(entity, using=using)
    versions: Any = QuerySet(entity.versions, using=using)
    heads = StreamHead.objects.using(using).filter(log=entity.versions._meta.db_table)
    newest = versions.filter(stream=OuterRef("stream")).order_by("-version").values("pk")[:1]
    pairs = heads.annotate(newest_=Subquery(newest)).values_list("stream", "version", "newest_")
    for batch in _by_key(pairs, "stream"):
        found = rows.in_bulk([id for id, *_ in batch])
        last = versions.in_bulk([pk for *_, pk in batch if pk])
        faults = {id: _faults(head, found.get(id), last.get(pk)) for id, head, pk in batch}
        yield len(batch), [id for id, some in faults.items() if any(some)]
    streams = versions.exclude(stream=TOMBSTONE).values_list("stream").distinct()
    for source, key in ((rows.values_list("pk"), "pk"), (streams, "stream")):
        for batch in _by_key(source, key):
            ids = {id for (id,) in batch}
            ids.difference_update(heads.filter(stream__in=ids).values_list("stream", flat=True))
            if key == "stream":
                ids.difference_update(rows.filter(pk__in=ids).values_list("pk", flat=True))
            yield len(ids), sorted(ids)


def _by_key(rows: QuerySet[Any, Any], key: str) -> Iterator[list[Any]]:
    """Yield the rows in batches, in the order of ``key``, which is their first column."""
    rows = rows.order_by(key)
    batch = list(rows[:BATCH_SIZE])
    while batch:
        yield batch
        batch = list(rows.filter(**{f"{key}__gt": batch[-1][0]})[:BATCH_SIZE])


def _faults(head: int, row: Any, newest: Any) -> Iterator[Fault]:
    """Yield the differences of one entity. The version of a head that does not exist is 0."""
    ends = f"the newest version is {newest.version}" if newest else f"the head is at {head}"
    last = newest.version if newest else head
    if head != last:
        yield "head", f"the head is at version {head}, {ends}"
    if newest and not row and newest.state is not None:
        yield "row", f"there is no row, and version {last} has a state"
    elif newest and row and newest.state is None:
        yield "row", f"there is a row, and version {last} has no state"
    elif row and row.version != last:
        yield "version", f"the row is at version {row.version}, {ends}"
    elif newest and row and row.state != newest.state:
        yield "state", f"the row has another state than version {last}"
    elif newest and row and (stale := _stale(row)):
        names = ", ".join(stale)
        yield "state", f"columns of the row do not follow from its state: {names}"


def _settle(entity: Any, id: str, repair: bool, using: str) -> tuple[list[Fault], str]:
    """Compare again, with the head locked; return the differences, and what was repaired."""
    done = ""
    with locked(entity, id, using=using) as (head, newest):
        row = QuerySet(entity, using=using).filter(pk=id).first()
        faults = list(_faults(head, row, newest))
        if faults and repair:
            done = _repair(entity, id, head, row, newest, using=using)
        if not done or done.startswith(LEFT):
            transaction.set_rollback(True, using=using)
    return faults, done


def _repair(entity: Any, id: str, head: int, row: Any, newest: Any, *, using: str) -> str:
    if newest is None:
        return f"{LEFT}: there is no version to repair it from"
    if row and row.version == head > newest.version:
        return f"{LEFT}: row and head are at version {head}; restore the missing versions"
    if row and newest.state is None:
        return f"{LEFT}: if no command wrote the row, delete it"
    done = []
    if head != newest.version:
        heads = StreamHead.objects.using(using).filter(stream=id)
        heads.filter(log=entity.versions._meta.db_table).update(version=newest.version)
        done.append("the head was written")
    if any(_faults(newest.version, row, newest)):
        changed = row.changed_at if row and row.state == newest.state else newest.recorded_at
        values = {"version": newest.version, "state": newest.state, "changed_at": changed}
        try:
            values |= _columns(entity(pk=id, **values))
            with transaction.atomic(using=using):
                rows: Any = QuerySet(entity, using=using)
                if not rows.filter(pk=id).update(**values):
                    rows.bulk_create([entity(pk=id, **values)])
        except OperationalError:
            raise
        except Exception as error:  # the type's own code, or an index
            return f"{LEFT}: the row cannot be written: {error!r}"
        done.append("the row was written")
    return ", ".join(done)


def _columns(row: Any) -> dict[str, Any]:
    entity: Any = type(row)
    copy = entity(pk=row.pk, version=row.version, state=deepcopy(row.state))
    return derived_columns("verify", spec_of(entity), copy)


def _stale(row: Any) -> list[str]:
    entity: Any = type(row)
    fields = spec_of(entity).fields
    try:
        # Compared as stored: values of a project's field need not be comparable.
        made = {name: fields[name].get_prep_value(value) for name, value in _columns(row).items()}
        return [n for n in made if made[n] != fields[n].get_prep_value(getattr(row, n))]
    except Exception as error:  # the type's own code
        return [f"columns() raises {error!r}"]
