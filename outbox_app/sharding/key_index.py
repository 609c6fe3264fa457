"""Looks up a row of a split table by another key than the split column, and reads one partition.

An index table has, for each row, the key and the value of the column by which the table is split.
Triggers keep it up to date, in the transaction of each write. The key is the primary key of the
index table, so it is unique there even if the split table cannot keep it unique. While the index is
filled, writers wait. If the migration is killed at any point, migrate again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from zlib import crc32

from django.db import connections, router
from django.db.models.expressions import RawSQL

from ..exceptions import InvalidArgument
from .sharded_table import TableOperation, field_of
from .table import MysqlTable, PostgresTable, Table


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
        self._index(model, connection).make()

    def backwards(self, model: Any, connection: Any) -> None:
        self._index(model, connection).remove()

    def _index(self, model: Any, connection: Any) -> _Index:
        key, by = (field_of(model, name).column for name in (self.key, self.by))
        if key == by:
            raise InvalidArgument(f"The table of {self.model} is split by {self.by} itself.")
        kind = {"postgresql": _PostgresIndex, "mysql": _MysqlIndex}[connection.vendor]
        index: _Index = kind(model, key, by, connection)
        return index


def index_table(model: Any, key: str) -> str:
    table = model._meta.db_table
    return f"{_cut(table, 24)}_by_{_cut(key, 16)}_{crc32(f'{table}.{key}'.encode()):08x}"


def _cut(name: str, size: int) -> str:
    """Return the first bytes of a name. PostgreSQL cuts names by bytes, and without an error."""
    return name.encode()[:size].decode(errors="ignore")


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


class _Index(Table):
    #: Makes the index anew if there is one.
    make: Callable[[], None]
    remove: Callable[[], None]

    def __init__(self, model: Any, key: str, by: str, connection: Any) -> None:
        super().__init__(model, connection)
        self.columns, self.key = [key, by], self.quote(key)
        self.index = index_table(model, key)
        self.n = self.quote(self.index)
        both, where = self.names(self.columns), f"WHERE {self.key} = OLD.{self.key}"
        values = ", ".join(f"{self.quote(name)} = NEW.{self.quote(name)}" for name in self.columns)
        #: For each event on the table the statement that repeats it on the index.
        self.repeated = {
            "DELETE": f"DELETE FROM {self.n} {where}",
            "UPDATE": f"UPDATE {self.n} SET {values} {where}",
            "INSERT": f"INSERT INTO {self.n} ({both}) VALUES ({self.names(self.columns, 'NEW.')})",
        }
        self.rows = f"SELECT {both} FROM {self.t}"


class _PostgresIndex(PostgresTable, _Index):
    def make(self) -> None:
        with self.locked("SHARE ROW EXCLUSIVE"):
            self._drop()
            self.run(f"CREATE TABLE {self.n} AS {self.rows}")
            self.run(f"ALTER TABLE {self.n} ADD PRIMARY KEY ({self.key})")
            self._add_triggers()
            self.run(f"ANALYZE {self.n}")

    def _add_triggers(self) -> None:
        body = " ".join(f"WHEN '{event}' THEN {sql};" for event, sql in self.repeated.items())
        # The function runs with its owner's rights: writers have none on the index.
        self.run(
            f"CREATE FUNCTION {self.n}() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER "
            f"SET search_path FROM CURRENT AS $$ BEGIN CASE TG_OP {body} ELSE TRUNCATE {self.n}; "
            "END CASE; RETURN NULL; END $$"
        )
        old, new = self.names(self.columns, "OLD."), self.names(self.columns, "NEW.")
        for name, event, each in [
            ("write", "INSERT OR DELETE", "ROW"),
            # Not UPDATE OF: a trigger of the project may change columns that an UPDATE omits.
            ("move", "UPDATE", f"ROW WHEN (({old}) IS DISTINCT FROM ({new}))"),
            ("empty", "TRUNCATE", "STATEMENT"),
        ]:
            self.run(
                f"CREATE TRIGGER {self.quote(f'{self.index}_{name}')} AFTER {event} ON {self.t} "
                f"FOR EACH {each} EXECUTE FUNCTION {self.n}()"
            )

    def remove(self) -> None:
        # DROP TRIGGER would lock partitions before their table, readers lock them after it.
        with self.locked("ACCESS EXCLUSIVE"):
            self._drop()

    def _drop(self) -> None:
        for (function,) in self.run(
            "SELECT DISTINCT tgfoid::regprocedure::text FROM pg_trigger "
            "WHERE tgrelid = %s::regclass AND NOT tgisinternal AND starts_with(tgname, %s)",
            [self.t, f"{self.index}_"],
        ):
            self.run(f"DROP FUNCTION {function} CASCADE")
        self.run(f"DROP TABLE IF EXISTS {self.n}")


class _MysqlIndex(MysqlTable, _Index):
    def make(self) -> None:
        with self.session():
            self._drop()
            self.run(f"CREATE TABLE {self.n} AS {self.rows} WHERE 1 = 0")
            self.run(f"ALTER TABLE {self.n} ADD PRIMARY KEY ({self.key})")
            with self.locked(self.n):
                self.run(f"INSERT INTO {self.n} {self.rows}")
                # INSERT is the last: if this ends in between, no writer meets an old key.
                for event, sql in self.repeated.items():
                    name = self.quote(f"{self.index}_{event[0]}".lower())
                    self.run(f"CREATE TRIGGER {name} AFTER {event} ON {self.t} FOR EACH ROW {sql}")

    def remove(self) -> None:
        with self.session():
            self._drop()

    def _drop(self) -> None:
        # The lock comes first: a run that was killed may still create a trigger, under its own.
        with self.locked():
            for (name,) in self.run(
                "SELECT trigger_name FROM information_schema.triggers WHERE "
                "trigger_schema = DATABASE() AND LEFT(trigger_name, %s) = %s",
                [len(self.index) + 1, f"{self.index}_".lower()],
            ):
                self.run(f"DROP TRIGGER {self.quote(name)}")
        self.run(f"DROP TABLE IF EXISTS {self.n}")
