"""How a table is split on PostgreSQL, and on MySQL and MariaDB: the statements of ``ShardedTable``.

The tables of each run have unique names, so two runs at once cannot write to the same table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any
from uuid import uuid4
from zlib import crc32

from django.db import models
from django.db.backends.utils import truncate_name

from ..failpoints import failpoint
from .table_copy import MysqlCopy, PostgresCopy, TableCopy, cut

MOST_SHARDS = 1024


class Partitions(TableCopy):
    """A table, and the partitioned table that will replace it."""

    is_split: Callable[[], bool]
    #: Descriptions of what the new table would lack, such as triggers and foreign keys.
    obstacles: Callable[[], list[str]]

    def __init__(self, model: Any, by: Any, shards: int, connection: Any) -> None:
        table, pk = model._meta.db_table, model._meta.pk.column
        self.shards, self.by_field, self.by = shards, by, by.column
        self.given_up: set[str] = set()
        prefix = f"{cut(table, 28)}_{crc32(table.encode()):08x}__split_"
        new, key = f"{prefix}{uuid4().hex[:6]}", list(dict.fromkeys([pk, by.column]))
        super().__init__(model, connection, new=new, prefix=prefix, key=key)

    def unique_indexes(self) -> Iterator[tuple[str, list[str], bool]]:
        """Yield the name and columns of each, and whether it is the primary key."""
        with self.connection.cursor() as cursor:
            found = self.connection.introspection.get_constraints(cursor, self.table)
        for name, each in found.items():
            if each["unique"] or each["primary_key"]:
                yield name, list(each["columns"]), each["primary_key"]


class PostgresPartitions(PostgresCopy, Partitions):
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
            "UNION ALL SELECT 'foreign key ' || conname || ' of ' || conrelid::regclass "
            "FROM pg_constraint WHERE confrelid = {t} AND contype = 'f' AND conparentid = 0 "
            "UNION ALL SELECT 'foreign key that is not valid ' || conname FROM pg_constraint "
            "WHERE conrelid = {t} AND contype = 'f' AND NOT convalidated "
            # The new table is made in the first schema, but clients may look only in the table's.
            "UNION ALL SELECT 'schema ' || nspname || ', not the first of search_path,' "
            "FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace "
            "WHERE c.oid = {t} AND nspname <> current_schema() "
            # ON CONFLICT DO NOTHING fails on a table with a deferrable unique constraint.
            "UNION ALL SELECT 'deferrable constraint ' || conname FROM pg_constraint "
            "WHERE conrelid = {t} AND condeferrable AND contype <> 'f' AND conname <> ALL(%s) "
            "UNION ALL SELECT DISTINCT 'view ' || ev_class::regclass FROM pg_rewrite r "
            "JOIN pg_depend d ON d.objid = r.oid WHERE d.refobjid = {t} AND ev_class <> {t}"
        )
        sql = sql.format(t=f"'{self.t}'::regclass")
        return [text for (text,) in self.run(sql, [list(self.given_up)])]

    def create(self) -> None:
        with self.bounded():
            self.run(
                f"CREATE TABLE {self.n} (LIKE {self.t} INCLUDING ALL EXCLUDING INDEXES) "
                f"PARTITION BY HASH ({self.quote(self.by)})"
            )
            for number in range(self.shards):
                self.run(
                    f"CREATE TABLE {self.quote(f'{self.new}_{number}')} PARTITION OF {self.n} "
                    f"FOR VALUES WITH (MODULUS {self.shards}, REMAINDER {number})"
                )
            self.renamed = list(self._make_indexes())
            for (sql,) in self.run(
                "SELECT format('GRANT %%s%%s ON %%s TO %%s%%s', privilege_type, these, %s::text, "
                "CASE grantee WHEN 0 THEN 'PUBLIC' ELSE grantee::regrole::text END, "
                "CASE WHEN is_grantable THEN ' WITH GRANT OPTION' END) "
                "FROM (SELECT relacl, '' FROM pg_class WHERE oid = %s::regclass UNION ALL "
                "SELECT attacl, format(' (%%I)', attname) FROM pg_attribute "
                "WHERE attrelid = %s::regclass AND NOT attisdropped) AS of (acl, these), "
                "aclexplode(acl)",
                [self.n, self.t, self.t],
            ):
                self.run(sql)
            self.make_journal()

    def _make_indexes(self) -> Iterator[tuple[str, str]]:
        """Make the indexes of the table; yield their names, and their names after the swap."""
        for name, primary, constraint, unique, definition in self.run(
            "SELECT c.relname, indisprimary, pg_get_constraintdef(o.oid), indisunique, "
            "pg_get_indexdef(indexrelid) FROM pg_index i JOIN pg_class c ON c.oid = indexrelid "
            "LEFT JOIN pg_constraint o ON conindid = indexrelid AND conrelid = indrelid "
            "AND contype IN ('u', 'x') WHERE indrelid = %s::regclass AND indisvalid",
            [self.t],
        ):
            index = self.quote(f"{self.new}_{len(name)}_{crc32(name.encode()):08x}")
            if primary:
                constraint = f"PRIMARY KEY ({self.names(self.key)})"
            if constraint and name not in self.given_up:
                self.run(f"ALTER TABLE {self.n} ADD CONSTRAINT {index} {constraint}")
            else:
                kind = "UNIQUE INDEX" if unique and name not in self.given_up else "INDEX"
                of = definition.partition(" USING ")[2]
                self.run(f"CREATE {kind} {index} ON {self.n} USING {of}")
            yield index, self.quote(name)

    def take_over(self) -> None:
        sequences = list(self._move_sequences())
        keys = self.run(
            "SELECT quote_ident(conname) || ' ' || pg_get_constraintdef(oid) FROM pg_constraint "
            "WHERE conrelid = %s::regclass AND contype = 'f'",
            [self.t],
        )
        self.run(f"DROP TABLE {self.t}")
        self.run(f"ALTER TABLE {self.n} RENAME TO {self.t}")
        for name, to in [*self.renamed, *sequences]:
            self.run(f"ALTER INDEX {name} RENAME TO {to}")
        # Django counts characters, PostgreSQL bytes.
        longest = self.connection.ops.max_name_length() - len(self.table.encode()) + len(self.table)
        for number in range(self.shards):
            name = self.quote(f"{self.new}_{number}")
            to = self.quote(truncate_name(f"{self.table}_{number}", longest, hash_len=8))
            # Added only now: before, the copy would still reference rows that others delete.
            for (key,) in keys:
                self.run(f"ALTER TABLE {name} ADD CONSTRAINT {key} NOT VALID")
            self.run(f"ALTER TABLE {name} RENAME TO {to}")
        failpoint("split_swapped")

    def sweep(self) -> None:
        """Remove leftovers; validate foreign keys of the partitions, and add them to the table."""
        super().sweep()
        keys = {}
        for partition, name, key in self.run(
            "SELECT conrelid::regclass::text, quote_ident(conname), pg_get_constraintdef(c.oid) "
            "FROM pg_constraint c JOIN pg_inherits ON inhrelid = conrelid "
            "WHERE inhparent = %s::regclass AND contype = 'f' AND conparentid = 0",
            [self.t],
        ):
            self.retry(self.run, f"ALTER TABLE {partition} VALIDATE CONSTRAINT {name}")
            keys[name] = key.removesuffix(" NOT VALID")
        for name, key in keys.items():
            self.retry(self.run, f"ALTER TABLE {self.t} ADD CONSTRAINT {name} {key}")

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


class MysqlPartitions(MysqlCopy, Partitions):
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
            "WHERE constraint_schema = DATABASE() AND %s IN (table_name, referenced_table_name) "
            "UNION ALL SELECT CONCAT('trigger ', trigger_name) FROM information_schema.triggers "
            "WHERE event_object_schema = DATABASE() AND event_object_table = %s",
            [self.table] * 2,
        )
        return [text for (text,) in found]

    def create(self) -> None:
        self.run(f"CREATE TABLE {self.n} LIKE {self.t}")
        changes = ["DROP PRIMARY KEY", f"ADD PRIMARY KEY ({self.names(self.key)})"]
        for name, columns, primary in self.unique_indexes():
            if name in self.given_up and not primary:
                index = self.quote(name)
                changes += [f"DROP INDEX {index}", f"ADD INDEX {index} ({self.names(columns)})"]
        self.run(
            f"ALTER TABLE {self.n} {', '.join(changes)} "
            f"PARTITION BY {self.method} ({self.quote(self.by)}) PARTITIONS {self.shards}"
        )
        self.make_journal()

    def swap(self) -> None:
        """Swap the names. MariaDB renames without a lock, so triggers keep the tables equal."""
        self.retry(self.mirror)
        failpoint("split_mirrored")
        old = self.quote(f"{self.new}_old")
        self.retry(self.run, f"RENAME TABLE {self.t} TO {old}, {self.n} TO {self.t}")
        failpoint("split_swapped")
