"""Compares rows of entities, heads of their streams, and newest versions; repairs from the latter.

Heads are read in the order of their streams, a batch at once, with the rows and newest versions
that belong to them; then rows and versions that have no head. Commands go on meanwhile: what looks
different is read again with its head locked, and only what differs then is reported. Old versions
may have been pruned, all of them too: what is left is compared. An entity without a row is sound if
its newest version has no state: its creation was rejected, or it was erased.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NamedTuple

from django.db import OperationalError, transaction
from django.db.models import OuterRef, QuerySet, Subquery

from ..aliases import log_alias
from ..conf import outbox_settings
from ..eventlog.window import TOMBSTONE
from ..models import StreamHead
from .handling import spec_of
from .operations import locked, logger

#: Entities compared at once.
BATCH_SIZE = 500
#: What a repair says where it cannot know what is right.
LEFT = "left as it is"


class Fault(NamedTuple):
    """What differs: "head", "row" (whether there is one), its "version", or its "state"."""

    kind: str
    text: str


@dataclass(frozen=True, slots=True)
class Facts:
    """What is stored of an entity. A head that is absent is at 0."""

    head: int
    row: Any
    newest: Any

    def faults(self) -> Iterator[Fault]:
        row, newest = self.row, self.newest
        if newest is None:
            if row is not None and row.version != self.head:
                text = f"the row is at version {row.version}, the head at {self.head}"
                yield Fault("version", text)
            return
        last = newest.version
        if self.head != last:
            yield Fault("head", f"the head is at version {self.head}, the versions end at {last}")
        if row is None:
            if newest.state is not None:
                yield Fault("row", f"there is no row, and version {last} has a state")
        elif newest.state is None:
            yield Fault("row", f"there is a row, and version {last} has no state")
        elif row.version != last:
            text = f"the row is at version {row.version}, the versions end at {last}"
            yield Fault("version", text)
        elif row.state != newest.state:
            yield Fault("state", f"the row has another state than version {last}")
        elif stale := _stale(row):
            text = f"columns of the row do not follow from its state: {', '.join(stale)}"
            yield Fault("state", text)


def verify(
    entity: Any,
    *,
    repair: bool = False,
    using: str | None = None,
    write: Callable[[str], Any] = logger.info,
) -> int:
    """Compare rows, heads and newest versions of a type; return how many differences are left.

    With ``repair`` the row or the head is written from the newest version, with the head locked.
    ``write`` takes progress, and a line for each difference. Raises ``EntityContended`` where
    another transaction holds, for too long, an entity that looks different.
    """
    using = using or log_alias(entity.versions)
    label, begun = entity._meta.label, time.monotonic()
    told, entities, differences, repaired = begun, 0, 0, 0
    for count, suspects in _batches(entity, using):
        entities += count
        for id in suspects:
            if found := _settle(entity, id, repair, using):
                differences += 1
                repaired += bool(found[1]) and not found[1].startswith(LEFT)
                said = [*(fault.text for fault in found[0]), *filter(None, found[1:])]
                write(f"difference type={label} id={id!r}: {'; '.join(said)}")
        if 0 < outbox_settings().PROGRESS_INTERVAL <= time.monotonic() - told:
            told = time.monotonic()
            write(f"verifying type={label} entities={entities} differences={differences}")
    write(
        f"verified type={label} entities={entities} differences={differences} "
        f"repaired={repaired} database={using} seconds={time.monotonic() - begun:.1f}"
    )
    return differences - repaired


def differences(entity: Any, *, using: str) -> Iterator[tuple[str, Fault]]:
    """Yield what differs, by id. Raises ``EntityContended`` as ``verify``."""
    for _, suspects in _batches(entity, using):
        for id in suspects:
            found = _settle(entity, id, False, using)
            yield from ((id, fault) for fault in (found[0] if found else ()))


def _batches(entity: Any, using: str) -> Iterator[tuple[int, list[str]]]:
    """Yield how many entities were looked at, and those that look different."""
    rows: Any = QuerySet(entity, using=using)
    versions: Any = QuerySet(entity.versions, using=using)
    table = entity.versions._meta.db_table
    heads = StreamHead.objects.using(using).filter(log=table)
    newest = versions.filter(stream=OuterRef("stream")).order_by("-version").values("pk")[:1]
    pairs = heads.annotate(newest_=Subquery(newest)).values_list("stream", "version", "newest_")
    for batch in _by_key(pairs, "stream"):
        found = rows.in_bulk([id for id, *_ in batch])
        last = versions.in_bulk([pk for *_, pk in batch if pk])
        facts = {id: Facts(head, found.get(id), last.get(pk)) for id, head, pk in batch}
        yield len(batch), [id for id, each in facts.items() if any(each.faults())]
    streams = versions.exclude(stream=TOMBSTONE).values_list("stream").distinct()
    for source, key in ((rows.values_list("pk"), "pk"), (streams, "stream")):
        for batch in _by_key(source, key):
            ids = [id for (id,) in batch]
            there = set(heads.filter(stream__in=ids).values_list("stream", flat=True))
            if key == "stream":
                there |= set(rows.filter(pk__in=ids).values_list("pk", flat=True))
            without = [id for id in ids if id not in there]
            yield len(without), without


def _by_key(rows: QuerySet[Any, Any], key: str) -> Iterator[list[Any]]:
    """Yield the rows in batches, in the order of the key, which is their first value."""
    rows = rows.order_by(key)
    batch = list(rows[:BATCH_SIZE])
    while batch:
        yield batch
        batch = list(rows.filter(**{f"{key}__gt": batch[-1][0]})[:BATCH_SIZE])


def _settle(entity: Any, id: str, repair: bool, using: str) -> tuple[list[Fault], str] | None:
    """Look again, with the head locked; return what differs, and what was done about it."""
    with locked(entity, id, using=using) as head:
        versions: Any = QuerySet(entity.versions, using=using).filter(stream=id)
        newest = versions.order_by("-version").first()
        row = QuerySet(entity, using=using).filter(pk=id).first()
        facts = Facts(head, row, newest)
        faults = list(facts.faults())
        done = _repair(entity, id, facts, using) if faults and repair else ""
        if not done or done.startswith(LEFT):
            transaction.set_rollback(True, using=using)
    return (faults, done) if faults else None


def _repair(entity: Any, id: str, facts: Facts, using: str) -> str:
    row, newest = facts.row, facts.newest
    if newest is None:
        return f"{LEFT}: no version is kept that says what is right"
    if row is not None and row.version == facts.head > newest.version:
        return f"{LEFT}: versions are missing that row and head have seen; restore them"
    if row is not None and newest.state is None:
        return f"{LEFT}: if no command wrote the row, delete it"
    done = []
    if facts.head != newest.version:
        heads = StreamHead.objects.using(using).filter(
            log=entity.versions._meta.db_table, stream=id
        )
        heads.update(version=newest.version)
        done.append("the head was written")
    if list(Facts(newest.version, row, newest).faults()):
        rows: Any = QuerySet(entity, using=using)
        changed = row.changed_at if row and row.state == newest.state else newest.recorded_at
        values = {"version": newest.version, "state": newest.state, "changed_at": changed}
        try:
            values |= _columns(entity(pk=id, **values))
            with transaction.atomic(using=using):
                if not rows.filter(pk=id).update(**values):
                    rows.bulk_create([entity(pk=id, **values)])
        except OperationalError:
            raise
        except Exception as error:  # the type's own code, or an index
            return f"{LEFT}: the row cannot be written: {error!r}"
        done.append("the row was written")
    return ", ".join(done)


def _columns(row: Any) -> dict[str, Any]:
    """Return what the type takes from the row's state into columns of its own."""
    entity: Any = type(row)
    types = spec_of(entity)
    if not types.derives_columns:
        return {}
    made = entity(pk=row.pk, version=row.version, state=deepcopy(row.state)).columns()
    fields = {name: types.fields[name] for name in made if name in types.fields}
    return {field.attname: field.to_python(made[name]) for name, field in fields.items()}


def _stale(row: Any) -> list[str]:
    try:
        made = _columns(row)
    except Exception as error:  # the type's own code
        return [f"columns() raises {error!r}"]
    return [name for name, value in made.items() if value != getattr(row, name)]
