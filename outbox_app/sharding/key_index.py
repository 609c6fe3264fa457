"""Looks up a row of a split table by another key than the split column, and reads one partition.

An index table has, for each row, the key and the value of the column by which the table is split.
Triggers keep it up to date, in the transaction of each write. The key is the primary key of the
index table, so it is unique there even if the split table cannot keep it unique. The index is
filled while the table is in use. If the migration is killed at any point, migrate again.
"""

from __future__ import annotations

from typing import Any
from zlib import crc32

from django.db import connections, router, transaction
from django.db.models.expressions import RawSQL

from ..exceptions import InvalidArgument
from .sharded_table import TableOperation, field_of
from .table_copy import MysqlCopy, PostgresCopy, TableCopy, cut


class KeyIndex(TableOperation):
    """Keep an index table that maps a key to the value of the split column, for ``find_by_key``.

    Args:
        model: The name of the model, or ``"app_label.Name"`` for another app.
        key: The unique field by which rows are looked up.
        by: The field by which the table is split.
    """

    def __init__(self, model: str, *, key: str, by: str) -> None:
        self.model, self.key, self.by = model, key, by

    def describe(self) -> str:
        return f"Keep an index of {self.model} from {self.key} to {self.by}"

    def forwards(self, model: Any, connection: Any) -> None:
        index = self._index(model, connection)
        index.sweep()
        index.make()

    def backwards(self, model: Any, connection: Any) -> None:
        self._index(model, connection).sweep()

    def _index(self, model: Any, connection: Any) -> TableCopy:
        key, by = (field_of(model, name).column for name in (self.key, self.by))
        if key == by:
            raise InvalidArgument(f"The table of {self.model} is split by {self.by} itself.")
        kind = {"postgresql": _PostgresIndex, "mysql": _MysqlIndex}[connection.vendor]
        name = index_table(model, key)
        index: TableCopy = kind(model, connection, new=name, prefix=name, key=[key])
        index.columns = [key, by]
        return index


def index_table(model: Any, key: str) -> str:
    table = model._meta.db_table
    return f"{cut(table, 24)}_by_{cut(key, 16)}_{crc32(f'{table}.{key}'.encode()):08x}"


def find_by_key(model: Any, *, using: str | None = None, **key: Any) -> Any:
    """Return the row with a key that has a ``KeyIndex``. On SQLite the key may be any field.

    Raises ``model.DoesNotExist``.

    Args:
        key: One field and its value: ``number="A-17"``.
    """
    if len(key) != 1:
        raise InvalidArgument(f"find_by_key() takes one key; it got {', '.join(key) or 'none'}.")
    using = using or router.db_for_read(model)
    connection, [(name, value)] = connections[using], key.items()
    rows = model._default_manager.using(using)
    if connection.vendor == "sqlite":
        return rows.get(**key)
    field, before = model._meta.get_field(name), None
    table = connection.ops.quote_name(index_table(model, field.column))
    column = connection.ops.quote_name(field.column)
    wanted = field.get_db_prep_value(value, connection)
    while True:
        with connection.cursor() as cursor:
            cursor.execute(f"SELECT * FROM {table} WHERE {column} = %s", [wanted])
            found = cursor.fetchone()
            names = [each[0] for each in cursor.description]
        if found is None:
            raise model.DoesNotExist(f"There is no {model._meta.label} with {name} = {value!r}.")
        split_by = next(f for f in model._meta.concrete_fields if f.column == names[1])
        # Pass the value back as the database returned it, without converting it to a Python type.
        there = rows.filter(**{split_by.attname: RawSQL("%s", [found[1]])})
        try:
            return there.get(**key)
        except model.DoesNotExist:
            if found == before:
                raise
            before = found  # the row may have moved between the two queries


class _Index(TableCopy):
    #: Two rows with one key are an error here, and must not be skipped.
    ignores_conflicts = False

    def create(self) -> None:
        with transaction.atomic(using=self.connection.alias):
            self.run(
                f"CREATE TABLE {self.n} AS SELECT {self.names(self.columns)} FROM {self.t} "
                "WHERE 1 = 0"
            )
            self.run(f"ALTER TABLE {self.n} ADD PRIMARY KEY ({self.names(self.key)})")
            self.make_journal()

    def copy(self) -> None:
        key = self.names(self.key)
        # The copy skips the second of two rows with one key. For later changes they are an error.
        for value, *_ in self.run(
            f"SELECT {key} FROM {self.t} GROUP BY {key} HAVING count(*) > 1 LIMIT 1"
        ):
            raise InvalidArgument(f"{self.table} has two rows with {self.key[0]} = {value!r}.")
        super().copy()


class _PostgresIndex(PostgresCopy, _Index):
    def take_over(self) -> None:
        old, new = self.names(self.columns, "OLD."), self.names(self.columns, "NEW.")
        # Not UPDATE OF: a trigger of the project may change columns that an UPDATE does not name.
        moves = f"ROW WHEN (({old}) IS DISTINCT FROM ({new}))"
        for event, body in self.mirrored().items():
            each = moves if event == "UPDATE" else "ROW"
            self.add_trigger(event.lower(), event, f"{body};", each=each)
        self.add_trigger("empty", "TRUNCATE", f"TRUNCATE {self.n};", each="STATEMENT")
        note = self.quote(f"{self.new}_note")
        self.run(f"DROP FUNCTION {note} CASCADE")
        self.run(f"DROP TABLE {self.j}")


class _MysqlIndex(MysqlCopy, _Index):
    def swap(self) -> None:
        self.retry(self.mirror)
        for name in self.triggers(f"{self.new}_n"):
            self.retry(self.run, f"DROP TRIGGER {self.quote(name)}")
        self.run(f"DROP TABLE {self.j}")
