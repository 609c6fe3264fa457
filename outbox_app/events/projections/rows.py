"""The rows of a projection: events are applied in memory, and a page is written at once.

Rows are locked in the order of their keys, so partitions and pushes that change the same row wait
for each other. If another transaction has just inserted one of the new rows, the page starts again.

The rule for rows with versions: the pull gets, in order, all events that the projection asks for,
so it applies every event above the row's version. A pushed event may arrive out of order. It is
applied only if the row has applied the event before it in the stream that the projection asks
for; otherwise it is left to the pull. So a row always has exactly the events up to its version. A
deleted row would lose its version, so it stays, marked in its field ``deleted``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NamedTuple

from django.db import IntegrityError, connections, models, transaction

from ...database.upsert import PLAIN, array_type, upsert
from ...failpoints import failpoint
from ...jobs.staging.insert import CHUNK_BYTES, chunks
from ..exceptions import InvalidSubscriber
from ..log.record import RecordedEvent

if TYPE_CHECKING:
    from .projection import Projection

#: How often a page is tried while other transactions insert its rows.
ATTEMPTS = 5

Rows = dict[Any, Any]


class PendingEvent(NamedTuple):
    event: RecordedEvent
    #: The version of the event before it, in its stream, that the projection asks for; 0 if there
    #: is none. None in the pull, which has applied that event.
    previous: int | None = None


Keyed = tuple[Any, PendingEvent]


class ProjectionTable:
    """The rows of a projection, in its model's table or in another table with its columns."""

    def __init__(
        self, projection: Projection, *, using: str, table: type[models.Model] | None = None
    ) -> None:
        self.projection = projection
        self.using = using
        self.model = projection.model
        meta = self.model._meta
        assert meta.pk is not None
        self.pk = meta.pk
        self.rows = (table or self.model)._base_manager.using(using)
        self.columns = [field.attname for field in meta.concrete_fields]
        self.written = [
            field.name
            for field in meta.concrete_fields
            # An update keeps the values that only an INSERT sets (auto_now_add).
            if not (field.generated or field == self.pk or getattr(field, "auto_now_add", False))
        ]
        self.keeps_deleted = projection.push and "deleted" in self.columns

    def apply(self, pending: Sequence[PendingEvent]) -> None:
        """Apply events, in order, inside the open transaction. Raises ``InvalidSubscriber``."""
        keyed = [(self.key(each.event), each) for each in pending]
        if keyed and self.projection.push and pending[0].previous is None:
            keyed = self._not_applied(keyed)
        keys = sorted({key for key, _ in keyed})
        for attempt in range(1, ATTEMPTS + 1):
            before = self._read(keys)
            failpoint("view_read")
            after = self.fold(before, keyed)
            new = [row for key, row in after.items() if row is not None and key not in before]
            changed = [row for key, row in after.items() if row is not None and key in before]
            gone = [key for key, row in after.items() if row is None and key in before]
            try:
                with transaction.atomic(using=self.using) if new else nullcontext():
                    # New rows last: they may have a unique value that a deleted or changed row had.
                    if gone:
                        self.rows.filter(pk__in=gone).delete()
                    for rows in self.packets(changed if self.written else []):
                        upsert(self.rows, rows, update=self.written, unique=[self.pk.name])
                    for rows in self.packets(sorted(new, key=lambda row: row.pk)):
                        self.rows.bulk_create(rows)
                return
            except IntegrityError:  # another transaction may have inserted a row since
                if attempt == ATTEMPTS or not new:
                    raise

    def packets(self, rows: list[Any]) -> Iterable[list[Any]]:
        """Yield the rows of each INSERT: MySQL ends the session if one exceeds its packet."""
        if connections[self.using].vendor != "mysql":
            return filter(None, [rows])
        return chunks(rows, rows=len(rows), bytes=CHUNK_BYTES, size=lambda row: len(str(vars(row))))

    def key(self, event: RecordedEvent) -> Any:
        """Return the key of the row that an event changes. Raises ``InvalidSubscriber``."""
        key = self.pk.to_python(self.projection.key(event))
        if key is None:
            raise InvalidSubscriber(
                f"Projection {self.projection.name!r}: key() returned None for "
                f"{event.stream}@{event.version}. Return the primary key of a row."
            )
        if isinstance(self.pk, models.DateTimeField):
            key = self.pk.get_prep_value(key)  # as it is stored: with a time zone
        if self.projection.push and str(key) != event.stream:
            raise InvalidSubscriber(
                f"Projection {self.projection.name!r}: the row of {event.stream}@{event.version} "
                f"has the key {key!r}, which is not the event's stream. Rows that several streams "
                "feed have no version, so they cannot be pushed. Leave push out, or key the rows "
                "by stream."
            )
        return key

    def _not_applied(self, keyed: list[Keyed]) -> list[Keyed]:
        """Leave out events that the rows have applied, without a lock: versions only grow.

        So if all events were pushed, the pull and the writers never wait for each other.
        """
        rows = self.rows.filter(pk__in={key for key, _ in keyed})
        applied = dict(rows.values_list("pk", "version"))
        return [each for each in keyed if each[1].event.version > applied.get(each[0], 0)]

    def _read(self, keys: list[Any]) -> Rows:
        """Read and lock the rows in the order of their keys, so that no two calls deadlock."""
        rows = self.rows.filter(pk__in=keys)
        array = array_type(self.pk, self.using)
        if array and {PLAIN[type(self.pk)]} == set(map(type, keys)):
            # One parameter, which costs less than many.
            name = connections[self.using].ops.quote_name(str(self.pk.column))
            rows = self.rows.extra(where=[f"{name} = ANY(%s::{array})"], params=[keys])
        rows = rows.order_by("pk").select_for_update()  # which SQLite ignores
        found: Rows = {}
        asked = set(keys)
        for values in rows.values_list(*self.columns):
            row = self.model.from_db(self.using, self.columns, values)
            if row.pk not in asked:
                raise InvalidSubscriber(
                    f"Projection {self.projection.name!r}: to the database, the key {row.pk!r} "
                    f"equals another one. Declare {self.model._meta.label}.{self.pk.name} with "
                    "outbox_app.fields.CharField, and run manage.py makemigrations and migrate."
                )
            found[row.pk] = row
        return found

    def fold(self, before: Rows, keyed: list[Keyed]) -> Rows:
        """Return the changed rows, and None for each deleted row, by key."""
        after: Rows = {}
        kind: Any = self.model
        for key, (event, previous) in keyed:
            row = after[key] if key in after else before.get(key)
            if self.projection.push and not self._is_next(event, previous, row):
                continue
            alive = None if row is None or (self.keeps_deleted and row.deleted) else row
            result: Any = self.projection.apply(event, alive)
            if result is None:
                if row is None:
                    continue
                result = self._deleted(row, event)
            elif not isinstance(result, kind):
                raise InvalidSubscriber(
                    f"Projection {self.projection.name!r}: apply() must return an instance of "
                    f"{self.model._meta.label}, or None; got {result!r}."
                )
            elif self.keeps_deleted:
                result.deleted = False
            if result is not None:
                result.pk = key
                if self.projection.push:
                    result.version = event.version
            after[key] = result
        return after

    def _is_next(self, event: RecordedEvent, previous: int | None, row: Any) -> bool:
        at = row.version if row is not None else 0
        if event.version <= at:
            return False
        return previous is None or self.projection.whole_state or previous <= at

    def _deleted(self, row: Any, event: RecordedEvent) -> Any:
        """Return the row that stays when an event deletes one, marked as deleted, or None."""
        if not self.projection.push:
            return None
        if not self.keeps_deleted:
            raise InvalidSubscriber(
                f"Projection {self.projection.name!r}: apply() returned None for the row of "
                f"{event.stream}@{event.version}. A row that can be pushed must not vanish: a late "
                f"push would bring it back. Give {self.model._meta.label} "
                "deleted = BooleanField(default=False), and leave such rows out where you read."
            )
        row.deleted = True
        return row
