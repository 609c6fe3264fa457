"""Copying a table into another one while it is written to, so that both are equal under a lock.

Triggers write the key of each row that changes into a journal; all rows are copied in batches; what
is in the journal is copied anew, the rest of it under a lock on the table. No row is lost or comes
back: every change since the triggers is in the journal, and what is copied last is what was there
under the lock. Copying locks no rows. Killed at any point, the table is as it was, with triggers
that the next run removes.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from typing import Any
from zlib import crc32

import django.db
from django.db import connections
from django.db.models.constants import OnConflict

from ..exceptions import OutboxError
from ..failpoints import failpoint
from ..process.lock_wait import atomic_with_lock_wait, is_conflict

#: Rows that one statement copies; keys of the journal that are left to the lock.
BATCH, FEW = 2000, 200
#: Seconds for which writers wait behind a lock that is waited for, and how often it is tried.
LOCK_WAIT, ATTEMPTS = 2, 60
#: Seconds in which the session of a run that was killed ends.
ENDS = 5


@contextmanager
def only_run(connection: Any, table: str) -> Iterator[None]:
    """Let no other run change this table: it would remove what this one has made.

    Raises ``OutboxError``. The lock ends with its session.
    """
    number = [crc32(f"{connection.settings_dict['NAME']}.{table}".encode())]
    until = time.monotonic() + ENDS
    is_postgres = connection.vendor == "postgresql"
    # On MySQL the session that works: what a run that was killed waits for is made when it comes,
    # and a trigger of it would write to what the next run has dropped. PostgreSQL rolls that back.
    own = connections.create_connection(connection.alias) if is_postgres else connection
    with closing(own):  # that of MySQL has settings of its own, too
        with own.cursor() as cursor:
            if is_postgres:
                # In a transaction, for which a pooler, too, keeps a session; it is idle.
                cursor.execute("BEGIN ISOLATION LEVEL READ COMMITTED")
                cursor.execute("SET LOCAL idle_in_transaction_session_timeout = 0")
                take = "SELECT pg_try_advisory_xact_lock(%s)"
            else:
                take = "SELECT GET_LOCK(CONCAT('outbox_table_', %s), 0)"
            while True:
                cursor.execute(take, number)
                if cursor.fetchone()[0]:
                    break
                if time.monotonic() > until:
                    raise OutboxError(
                        f"{table} is being split, or gets an index, in another session. Wait until "
                        "that has ended, and migrate again."
                    )
                time.sleep(0.1)
        yield


class TableCopy:
    """A table, the one that it is copied into, and the journal."""

    #: When ``watch`` returns, changes are recorded and older transactions have ended.
    create: Callable[[], None]
    watch: Callable[[], None]
    unwatch: Callable[[], None]
    swap: Callable[[], None]
    #: Names of the table's triggers that begin so.
    triggers: Callable[[str], list[str]]
    #: How many of them record changes.
    watches: int
    delete_sql: str
    analyze_sql: str
    #: How a column gets numbers.
    number: str
    #: Whether the rest may have a row that meets an older one: its own entry comes later.
    ignores_conflicts = True

    def __init__(
        self, model: Any, connection: Any, *, new: str, prefix: str, key: list[str]
    ) -> None:
        """Names in the database: of the table to make, and of all that is made; the key's columns,
        of which the first is indexed."""
        self.connection, self.quote = connection, connection.ops.quote_name
        self.table, self.pk = model._meta.db_table, model._meta.pk.column
        self.new, self.prefix, self.key = new, prefix, key
        self.t, self.n, self.j = map(self.quote, (self.table, new, f"{new}_keys"))
        generated = {field.column for field in model._meta.concrete_fields if field.generated}
        with connection.cursor() as cursor:
            found = connection.introspection.get_table_description(cursor, self.table)
        self.columns = [column.name for column in found if column.name not in generated]

    def run(self, sql: str, params: Any = None) -> list[Any]:
        with self.connection.cursor() as cursor:
            cursor.execute(sql, params)
            return cursor.fetchall() if cursor.description else []

    def names(self, columns: list[str], of: str = "") -> str:
        return ", ".join(of + self.quote(column) for column in columns)

    def make(self) -> None:
        try:
            self.retry(self.create)
            failpoint("split_created")
            self.watch()
            failpoint("split_watched")
            self.copy()
            self.run(f"{self.analyze_sql} {self.n}")
            self.catch_up(FEW)
            failpoint("split_synced")
            self.swap()
        except Exception:
            self.sweep()
            raise

    def copy(self) -> None:
        """Copy all rows in the order of their primary keys, a batch at a time."""
        pk, where = self.quote(self.pk), "1 = 1"
        after: list[Any] = []
        while True:
            upto = self.run(
                f"SELECT {pk} FROM {self.t} WHERE {where} ORDER BY {pk} LIMIT 1 OFFSET {BATCH - 1}",
                after,
            )
            bound = [value for row in upto for value in row]
            self.insert(f"{where} AND {pk} <= %s" if bound else where, [*after, *bound])
            failpoint("split_copied")
            if not bound:
                return
            after, where = bound, f"{pk} > %s"

    def sync(self) -> int:
        """Copy rows anew that have changed, in the order of the journal; return how many."""
        read = self.run(f"SELECT noted_n FROM {self.j} ORDER BY noted_n LIMIT {BATCH}")
        if read:
            # Not <= the highest: a lower one may be committed later.
            these = f"{self.j}.noted_n IN ({', '.join(str(n) for (n,) in read)})"
            keys = map(self.quote, self.key)  # no aliases: MySQL would want locks of their own
            same = " AND ".join(f"{self.n}.{key} = {self.j}.{key}" for key in keys)
            self.run(self.delete_sql.format(new=self.n, journal=self.j) + f" {same} AND {these}")
            key = self.quote(self.key[0])
            where = f"{key} IN (SELECT {key} FROM {self.j} WHERE {these})"
            self.insert(where, None, ignore=self.ignores_conflicts)
            self.run(f"DELETE FROM {self.j} WHERE {these}")
        return len(read)

    def catch_up(self, few: int = 0) -> None:
        while self.sync() > few:
            pass

    def check_watched(self) -> None:
        """Under the lock: without its own triggers a run would lose what was written since."""
        if len(self.triggers(f"{self.new}_n")) != self.watches:
            raise OutboxError(
                f"The triggers of this run on {self.table} are gone, so changes may be missing "
                "from the copy. The table is as it was. Migrate again."
            )

    def insert(self, where: str, params: Any, *, ignore: bool = True) -> None:
        columns, ops = self.names(self.columns), self.connection.ops
        how = OnConflict.IGNORE if ignore else None
        self.run(
            f"{ops.insert_statement(on_conflict=how)} {self.n} ({columns}) SELECT {columns} "
            f"FROM {self.t} WHERE {where} {ops.on_conflict_suffix_sql([], how, [], [])}",
            params,
        )

    def retry(self, step: Callable[..., Any], *args: Any) -> None:
        """Take a step that waits for a lock; others go on between two attempts."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                step(*args)
                return
            except django.db.OperationalError as error:
                if attempt == ATTEMPTS or not is_conflict(error):
                    raise
            time.sleep(random.uniform(0.5, 2))

    def sweep(self) -> None:
        """Remove what a run has left: first the triggers, then the tables that they write to."""
        small = self.connection.features.ignores_table_name_case  # lower_case_table_names
        kept = str.lower if small else str
        names = [kept(name) for name in self.connection.introspection.table_names()]
        left = [name for name in names if name.startswith(kept(self.prefix))]
        if kept(self.table) not in names:
            raise OutboxError(f"There is no table {self.table}. Is it one of {left}?")
        self.unwatch()
        for name in left:
            self.run(f"DROP TABLE IF EXISTS {self.quote(name)}")

    def make_journal(self) -> None:
        keys = self.names(self.key)
        self.run(f"CREATE TABLE {self.j} AS SELECT {keys} FROM {self.t} WHERE 1 = 0")
        self.run(f"ALTER TABLE {self.j} ADD noted_n BIGINT {self.number} PRIMARY KEY")

    def noted(self, *rows: str) -> str:
        values = ", ".join(f"({self.names(self.key, row)})" for row in rows)
        return f"INSERT INTO {self.j} ({self.names(self.key)}) VALUES {values}"

    def mirrored(self) -> dict[str, str]:
        """What each event on the table does to the new one."""
        where = " AND ".join(f"{self.quote(name)} = OLD.{self.quote(name)}" for name in self.key)
        given = ", ".join(f"{self.quote(name)} = NEW.{self.quote(name)}" for name in self.columns)
        return {
            "INSERT": f"INSERT INTO {self.n} ({self.names(self.columns)}) "
            f"VALUES ({self.names(self.columns, 'NEW.')})",
            "DELETE": f"DELETE FROM {self.n} WHERE {where}",
            "UPDATE": f"UPDATE {self.n} SET {given} WHERE {where}",
        }


class PostgresCopy(TableCopy):
    delete_sql, analyze_sql = "DELETE FROM {new} USING {journal} WHERE", "ANALYZE"
    number, watches = "GENERATED ALWAYS AS IDENTITY", 1
    #: Put the new table to its use, under the lock.
    take_over: Callable[[], None]

    def run(self, sql: str, params: Any = None) -> list[Any]:
        with nullcontext() if self.connection.in_atomic_block else self.bounded():
            return super().run(sql, params)

    def bounded(self) -> AbstractContextManager[None]:
        """Bound waits for locks in a transaction: behind a pooler the next one is elsewhere."""
        return atomic_with_lock_wait(LOCK_WAIT, using=self.connection.alias)

    def watch(self) -> None:
        body = (
            f"IF TG_OP <> 'INSERT' THEN {self.noted('OLD.')}; END IF; "
            f"IF TG_OP <> 'DELETE' THEN {self.noted('NEW.')}; END IF;"
        )
        self.retry(self.add_trigger, "note", "INSERT OR UPDATE OR DELETE", body)

    def add_trigger(self, name: str, events: str, body: str, each: str = "ROW") -> None:
        name = self.quote(f"{self.new}_{name}")
        # It runs as its owner, as writers have no rights on the table that it writes to.
        self.run(
            f"CREATE OR REPLACE FUNCTION {name}() RETURNS trigger LANGUAGE plpgsql SECURITY "
            f"DEFINER SET search_path FROM CURRENT AS $$ BEGIN {body} RETURN NULL; END $$"
        )
        self.run(
            f"CREATE TRIGGER {name} AFTER {events} ON {self.t} "
            f"FOR EACH {each} EXECUTE FUNCTION {name}()"
        )

    def triggers(self, prefix: str) -> list[str]:
        found = self.run(
            "SELECT tgname FROM pg_trigger WHERE tgrelid = %s::regclass AND NOT tgisinternal "
            "AND starts_with(tgname, %s)",
            [self.t, prefix],
        )
        return [name for (name,) in found]

    def unwatch(self) -> None:
        found = self.triggers(self.prefix)

        def drop() -> None:
            for name in found:
                self.run(f"DROP TRIGGER IF EXISTS {self.quote(name)} ON {self.t}")

        if found:
            # Dropping would lock partitions before their table, and writers lock them after it.
            self.retry(self.under_lock, drop)
        for (name,) in self.run(
            "SELECT proname FROM pg_proc WHERE pg_function_is_visible(oid) "
            "AND starts_with(proname, %s)",
            [self.prefix],
        ):
            self.run(f"DROP FUNCTION IF EXISTS {self.quote(name)}")

    def swap(self) -> None:
        self.retry(self.under_lock, self.check_watched, self.catch_up, self.take_over)

    def under_lock(self, *steps: Callable[[], None]) -> None:
        with self.bounded():
            self.run(f"LOCK TABLE {self.t} IN ACCESS EXCLUSIVE MODE")
            for step in steps:
                step()


class MysqlCopy(TableCopy):
    delete_sql = "DELETE {new} FROM {journal} STRAIGHT_JOIN {new} WHERE"
    analyze_sql = "ANALYZE TABLE"
    number, watches = "AUTO_INCREMENT", 3

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.run("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        self.run(
            f"SET SESSION lock_wait_timeout = {LOCK_WAIT}, "
            "SESSION sql_mode = CONCAT(@@sql_mode, ',NO_AUTO_VALUE_ON_ZERO')"
        )
        if not self.connection.mysql_is_mariadb:
            self.run("SET SESSION information_schema_stats_expiry = 0")

    def watch(self) -> None:
        for event, *rows in ("INSERT", "NEW."), ("UPDATE", "OLD.", "NEW."), ("DELETE", "OLD."):
            self.retry(self.add_trigger, "note", event, self.noted(*rows))

    def add_trigger(self, name: str, event: str, body: str) -> None:
        trigger = self.quote(f"{self.new}_{name[0]}{event[0]}".lower())
        self.run(f"CREATE TRIGGER {trigger} AFTER {event} ON {self.t} FOR EACH ROW {body}")

    def triggers(self, prefix: str) -> list[str]:
        found = self.run(
            "SELECT trigger_name FROM information_schema.triggers WHERE "
            "trigger_schema = DATABASE() AND LEFT(trigger_name, %s) = %s",
            [len(prefix), prefix.lower()],
        )
        return [name for (name,) in found]

    def unwatch(self) -> None:
        for name in self.triggers(self.prefix):
            self.retry(self.run, f"DROP TRIGGER IF EXISTS {self.quote(name)}")

    def mirror(self) -> None:
        """Under a lock copy what is left, and let each writer write to both from then on."""
        self.run(f"LOCK TABLES {self.t} WRITE, {self.n} WRITE, {self.j} WRITE")
        try:
            self.check_watched()
            self.catch_up()
            self.keep_number()
            for event, body in self.mirrored().items():
                self.add_trigger("mirror", event, body)
        finally:
            self.run("UNLOCK TABLES")

    def keep_number(self) -> None:
        """Have numbers go on where they are: one that was not used is not given out again."""
        [(number,)] = self.run(
            "SELECT auto_increment FROM information_schema.tables "
            "WHERE table_schema = DATABASE() AND table_name = %s",
            [self.table],
        )
        if number is not None and self.pk in self.columns:
            self.run(f"ALTER TABLE {self.n} ALGORITHM = INPLACE, AUTO_INCREMENT = {number}")
