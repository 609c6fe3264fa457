"""How a table is split on PostgreSQL, and on MySQL and MariaDB: the statements of ``ShardedTable``.

PostgreSQL copies the rows into a partitioned table, which takes the table's name, in one
transaction under a lock on the table. MySQL and MariaDB have one statement for it. If the process
is killed, the table is either as it was or split.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any
from zlib import crc32

from django.db import models
from django.db.backends.utils import truncate_name

from .table import MysqlTable, PostgresTable, Table

MOST_SHARDS = 1024


class Partitions(Table):
    """A table that is to be split. The methods are called within ``alone()``."""

    alone: Callable[[], AbstractContextManager[None]]
    is_split: Callable[[], bool]
    #: Descriptions of what a split would lose or break, such as triggers and foreign keys.
    obstacles: Callable[[], list[str]]
    split: Callable[[], None]

    def __init__(self, model: Any, by: Any, shards: int, connection: Any) -> None:
        super().__init__(model, connection)
        self.shards, self.by_field, self.by = shards, by, by.column
        self.key = list(dict.fromkeys([model._meta.pk.column, by.column]))
        self.given_up: set[str] = set()

    def unique_indexes(self) -> Iterator[tuple[str, list[str], bool]]:
        """Yield the name and columns of each, and whether it is the primary key."""
        with self.connection.cursor() as cursor:
            found = self.connection.introspection.get_constraints(cursor, self.table)
        for name, each in found.items():
            if each["unique"] or each["primary_key"]:
                yield name, list(each["columns"]), each["primary_key"]


class PostgresPartitions(PostgresTable, Partitions):
    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        #: The name of the new table until the old one is gone.
        self.new = f"outbox_split_{crc32(self.table.encode()):08x}"
        self.n = self.quote(self.new)

    def alone(self) -> AbstractContextManager[None]:
        return self.locked("ACCESS EXCLUSIVE")

    def is_split(self) -> bool:
        return bool(
            self.run(
                "SELECT 1 FROM pg_partitioned_table WHERE partrelid = %s::regclass AND "
                "pg_get_partkeydef(partrelid) = 'HASH (' || quote_ident(%s) || ')' AND "
                "(SELECT count(*) FROM pg_inherits WHERE inhparent = partrelid) = %s",
                [self.t, self.by, self.shards],
            )
        )

    def obstacles(self) -> list[str]:
        sql = (
            "SELECT 'trigger ' || tgname FROM pg_trigger WHERE tgrelid = {t} AND NOT tgisinternal "
            "UNION ALL SELECT 'policy ' || polname FROM pg_policy WHERE polrelid = {t} "
            "UNION ALL SELECT 'row security' FROM pg_class WHERE oid = {t} AND relrowsecurity "
            "UNION ALL SELECT 'rule ' || rulename FROM pg_rewrite WHERE ev_class = {t} "
            "UNION ALL SELECT 'inheritance from ' || inhparent::regclass "
            "FROM pg_inherits WHERE inhrelid = {t} "
            "UNION ALL SELECT 'foreign key ' || conname || ' of ' || conrelid::regclass "
            "FROM pg_constraint WHERE confrelid = {t} AND contype = 'f' AND conparentid = 0 "
            "UNION ALL SELECT 'foreign key that is not valid ' || conname FROM pg_constraint "
            "WHERE conrelid = {t} AND contype = 'f' AND NOT convalidated "
            # The new table is made in the first schema, but clients may look only in the table's.
            "UNION ALL SELECT 'schema ' || nspname || ', not the first of search_path,' "
            "FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace "
            "WHERE c.oid = {t} AND nspname <> current_schema() "
            "UNION ALL SELECT DISTINCT 'view ' || ev_class::regclass FROM pg_rewrite r "
            "JOIN pg_depend d ON d.objid = r.oid WHERE d.refobjid = {t} AND ev_class <> {t}"
        )
        return [text for (text,) in self.run(sql.format(t=f"'{self.t}'::regclass"))]

    def split(self) -> None:
        indexes, keys = list(self._indexes()), self._foreign_keys()
        self._create()
        self._copy()
        sequences = list(self._move_sequences())
        self.run(f"DROP TABLE {self.t}")
        self.run(f"ALTER TABLE {self.n} RENAME TO {self.t}")
        for name, to in sequences:
            self.run(f"ALTER SEQUENCE {name} RENAME TO {to}")
        # Django counts characters, PostgreSQL bytes.
        longest = self.connection.ops.max_name_length() - len(self.table.encode()) + len(self.table)
        for number in range(self.shards):
            to = self.quote(truncate_name(f"{self.table}_{number}", longest, hash_len=8))
            self.run(f"ALTER TABLE {self.quote(f'{self.new}_{number}')} RENAME TO {to}")
        for sql in [*indexes, *keys]:
            self.run(sql)
        self.run(f"ANALYZE {self.t}")

    def _indexes(self) -> Iterator[str]:
        """Yield the statements that make the indexes and unique constraints of the new table."""
        for name, primary, constraint, unique, definition in self.run(
            "SELECT c.relname, indisprimary, pg_get_constraintdef(o.oid), indisunique, "
            "pg_get_indexdef(indexrelid) FROM pg_index i JOIN pg_class c ON c.oid = indexrelid "
            "LEFT JOIN pg_constraint o ON conindid = indexrelid AND conrelid = indrelid "
            "AND contype IN ('u', 'x') WHERE indrelid = %s::regclass AND indisvalid",
            [self.t],
        ):
            index = self.quote(name)
            if primary:
                constraint = f"PRIMARY KEY ({self.names(self.key)})"
            if constraint and name not in self.given_up:
                yield f"ALTER TABLE {self.t} ADD CONSTRAINT {index} {constraint}"
            else:
                kind = "UNIQUE INDEX" if unique and name not in self.given_up else "INDEX"
                of = definition.partition(" USING ")[2]
                yield f"CREATE {kind} {index} ON {self.t} USING {of}"

    def _foreign_keys(self) -> list[str]:
        found = self.run(
            "SELECT quote_ident(conname) || ' ' || pg_get_constraintdef(oid) FROM pg_constraint "
            "WHERE conrelid = %s::regclass AND contype = 'f' AND conparentid = 0",
            [self.t],
        )
        return [f"ALTER TABLE {self.t} ADD CONSTRAINT {key}" for (key,) in found]

    def _create(self) -> None:
        """Create the new table, with the comment and the grants of the old one."""
        self.run(
            f"CREATE TABLE {self.n} (LIKE {self.t} INCLUDING ALL EXCLUDING INDEXES) "
            f"PARTITION BY HASH ({self.quote(self.by)})"
        )
        for number in range(self.shards):
            self.run(
                f"CREATE TABLE {self.quote(f'{self.new}_{number}')} PARTITION OF {self.n} "
                f"FOR VALUES WITH (MODULUS {self.shards}, REMAINDER {number})"
            )
        sql = (
            "SELECT format('COMMENT ON TABLE %s IS %L', {n}, obj_description({t}, 'pg_class')) "
            "UNION ALL SELECT format('GRANT %s%s ON %s TO %s%s', privilege_type, these, {n}, "
            "CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END, "
            "CASE WHEN is_grantable THEN ' WITH GRANT OPTION' END) "
            "FROM (SELECT relacl, '' FROM pg_class WHERE oid = {t} UNION ALL "
            "SELECT attacl, format(' (%I)', attname) FROM pg_attribute "
            "WHERE attrelid = {t} AND NOT attisdropped) AS of (acl, these), aclexplode(acl)"
        ).format(t=f"'{self.t}'::regclass", n=f"'{self.n}'")
        for (statement,) in self.run(sql):
            self.run(statement)

    def _copy(self) -> None:
        found = self.run(
            "SELECT attname FROM pg_attribute WHERE attrelid = %s::regclass AND attnum > 0 "
            "AND NOT attisdropped AND attgenerated = ''",
            [self.t],
        )
        columns = self.names([name for (name,) in found])
        self.run(
            f"INSERT INTO {self.n} ({columns}) OVERRIDING SYSTEM VALUE "
            f"SELECT {columns} FROM {self.t}"
        )

    def _move_sequences(self) -> Iterator[tuple[str, str]]:
        """Let the new table continue the sequences of the old one."""
        for column, identity, old, name in self.run(
            "SELECT attname, attidentity <> '', of, quote_ident(relname) FROM pg_attribute "
            "CROSS JOIN pg_get_serial_sequence(%s, attname) of JOIN pg_class c "
            "ON c.oid = of::regclass WHERE attrelid = %s::regclass AND attnum > 0 "
            "AND NOT attisdropped",
            [self.t] * 2,
        ):
            if identity:
                [(new,)] = self.run("SELECT pg_get_serial_sequence(%s, %s)", [self.n, column])
                self.run("SELECT setval(%s, nextval(%s))", [new, old])
                yield new, name
            else:
                self.run(f"ALTER SEQUENCE {old} OWNED BY {self.n}.{self.quote(column)}")


class MysqlPartitions(MysqlTable, Partitions):
    def alone(self) -> AbstractContextManager[None]:
        return self.session()

    @property
    def method(self) -> str:
        """Return HASH, which computes ``shard_of``, for integers, and KEY for other types."""
        field = getattr(self.by_field, "target_field", self.by_field)
        return "HASH" if isinstance(field, models.IntegerField) else "KEY"

    def is_split(self) -> bool:
        found = self.run(
            "SELECT partition_method, partition_expression FROM information_schema.partitions "
            "WHERE table_schema = DATABASE() AND table_name = %s",
            [self.table],
        )  # with ANSI_QUOTES the column is quoted with double quotes
        names = [(method, str(by).strip('`"')) for method, by in found]
        return names == [(self.method, self.by)] * self.shards

    def obstacles(self) -> list[str]:
        found = self.run(
            "SELECT CONCAT('foreign key ', constraint_name, ' of ', table_name) "
            "FROM information_schema.referential_constraints "
            "WHERE constraint_schema = DATABASE() AND %s IN (table_name, referenced_table_name)",
            [self.table],
        )
        return [text for (text,) in found]

    def split(self) -> None:
        changes = ["DROP PRIMARY KEY", f"ADD PRIMARY KEY ({self.names(self.key)})"]
        for name, columns, primary in self.unique_indexes():
            if name in self.given_up and not primary:
                index = self.quote(name)
                changes += [f"DROP INDEX {index}", f"ADD INDEX {index} ({self.names(columns)})"]
        self.run(
            f"ALTER TABLE {self.t} {', '.join(changes)}, ALGORITHM = COPY, LOCK = EXCLUSIVE "
            f"PARTITION BY {self.method} ({self.quote(self.by)}) PARTITIONS {self.shards}"
        )
