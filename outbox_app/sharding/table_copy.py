"""Copies a table into another one while it is in use, so that both are equal under a lock.

Triggers write the key of each changed row into a journal, and all rows are copied in batches. Then
the rows in the journal are copied again, the last of them under a lock on the table. No row is lost
and no deleted row comes back: the journal has every change since the triggers were created, and the
last copy is made under the lock. Copying locks no rows. If a run is killed at any point, the table
is unchanged, except for triggers that the next run removes.
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

from ..database.lock_wait import atomic_with_lock_wait, is_conflict
from ..exceptions import OutboxError
from ..failpoints import failpoint

#: The rows that one statement copies, and the keys in the journal that may be left to the lock.
BATCH, FEW = 2000, 200
#: Seconds to wait for a lock, while writers wait behind the request; and the number of attempts.
LOCK_WAIT, ATTEMPTS = 2, 60
#: Seconds within which the server ends the session of a killed run.
ENDS = 5
#: The mode in which MySQL copies. It is not strict: a table may have dates like 0000-00-00.
COPIES = "SESSION sql_mode = 'NO_AUTO_VALUE_ON_ZERO'"


@contextmanager
def only_run(connection: Any, table: str) -> Iterator[None]:
    """Lock out other runs on this table, which would remove the tables and triggers of this run.

    Raises ``OutboxError``. The lock ends with its session.
    """
    number = [crc32(f"{connection.settings_dict['NAME']}.{table}".encode())]
    until = time.monotonic() + ENDS
    is_postgres = connection.vendor == "postgresql"
    # On MySQL the working session holds the lock, until its last statement has ended: if a run is
    # killed while its CREATE TRIGGER waits, the server still creates the trigger, which would write
    # to a table that the next run has dropped. PostgreSQL rolls such a statement back.
    own = connections.create_connection(connection.alias) if is_postgres else connection
    with closing(own):  # on MySQL also because it has session settings of this run
        with own.cursor() as cursor:
            if is_postgres:
                # Even a pooler keeps one session for a transaction. This one stays idle.
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


def cut(name: str, size: int) -> str:
    """Return the first bytes of a name. PostgreSQL cuts names by bytes, and without an error."""
    return name.encode()[:size].decode(errors="ignore")


class TableCopy:
    """A table, the new table into which it is copied, and the journal."""

    #: When ``watch`` returns, the triggers record changes and older transactions have ended.
    create: Callable[[], None]
    watch: Callable[[], None]
    unwatch: Callable[[], None]
    swap: Callable[[], None]
    #: Returns the names of the table's triggers with this prefix.
    triggers: Callable[[str], list[str]]
    #: The number of triggers that record changes.
    watches: int
    delete_sql: str
    analyze_sql: str
    #: The SQL of the table's schema, and the SQL that skips a row whose unique values exist.
    schema: str
    skip_sql: str
    #: The SQL that makes a column number its rows.
    number: str
    #: Whether ``sync`` skips a row that conflicts with an older copy: a later entry copies it.
    ignores_conflicts = True

    def __init__(
        self, model: Any, connection: Any, *, new: str, prefix: str, key: list[str]
    ) -> None:
        """``new`` is the name of the new table. All names that a run makes begin with ``prefix``.
        The first column of ``key`` is indexed."""
        self.connection, self.quote = connection, connection.ops.quote_name
        self.table, self.pk = model._meta.db_table, model._meta.pk.column
        self.new, self.prefix, self.key = new, prefix, key
        self.t, self.n, self.j = map(self.quote, (self.table, new, f"{new}_keys"))
        # Also those that the model does not have, and invisible ones, which SELECT * leaves out.
        found = self.run(
            f"SELECT column_name FROM information_schema.columns WHERE table_schema = {self.schema}"
            " AND table_name = %s AND COALESCE(generation_expression, '') = ''",
            [self.table],
        )
        self.columns = [name for (name,) in found]

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
            self.retry(self.catch_up, FEW)
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
        """Copy changed rows again, in the order of the journal; return the number of entries."""
        read = self.run(f"SELECT noted_n FROM {self.j} ORDER BY noted_n LIMIT {BATCH}")
        if read:
            # Not <= the highest number: an entry with a lower one may be committed later.
            these = f"{self.j}.noted_n IN ({', '.join(str(n) for (n,) in read)})"
            keys = map(self.quote, self.key)  # no aliases: MySQL would require a lock for each
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
        """Check, under the lock, that the run's triggers exist: without them changes are lost."""
        if len(self.triggers(f"{self.new}_n")) != self.watches:
            raise OutboxError(
                f"The triggers of this run on {self.table} are gone, so changes may be missing "
                "from the copy. The table is unchanged. Migrate again."
            )

    def insert(self, where: str, params: Any, *, ignore: bool = True) -> None:
        columns, tail = self.names(self.columns), self.skip_sql if ignore else ""
        self.run(
            f"INSERT INTO {self.n} ({columns}) SELECT {columns} FROM {self.t} WHERE {where} {tail}",
            params,
        )

    def retry(self, step: Callable[..., Any], *args: Any) -> None:
        """Run a step that waits for a lock; between two attempts, writers can proceed."""
        for attempt in range(1, ATTEMPTS + 1):
            try:
                step(*args)
                return
            except django.db.OperationalError as error:
                if attempt == ATTEMPTS or not is_conflict(error):
                    raise
            time.sleep(random.uniform(0.5, 2))

    def sweep(self) -> None:
        """Remove the leftovers of runs: first the triggers, then the tables to which they write."""
        small = self.connection.features.ignores_table_name_case  # lower_case_table_names
        kept = str.lower if small else str
        names = [kept(name) for name in self.connection.introspection.table_names()]
        left = [name for name in names if name.startswith(kept(self.prefix))]
        if kept(self.table) not in names:
            raise OutboxError(f"The table {self.table} does not exist. Is it one of {left} now?")
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
        """Return, for each event on the table, the statement that repeats it on the new table."""
        where = " AND ".join(f"{self.quote(name)} = OLD.{self.quote(name)}" for name in self.key)
        values = ", ".join(f"{self.quote(name)} = NEW.{self.quote(name)}" for name in self.columns)
        return {
            "INSERT": f"INSERT INTO {self.n} ({self.names(self.columns)}) "
            f"VALUES ({self.names(self.columns, 'NEW.')})",
            "DELETE": f"DELETE FROM {self.n} WHERE {where}",
            "UPDATE": f"UPDATE {self.n} SET {values} WHERE {where}",
        }


class PostgresCopy(TableCopy):
    delete_sql, analyze_sql = "DELETE FROM {new} USING {journal} WHERE", "ANALYZE"
    schema, skip_sql = "current_schema()", "ON CONFLICT DO NOTHING"
    number, watches = "GENERATED ALWAYS AS IDENTITY", 1
    #: Puts the new table into use, under the lock.
    take_over: Callable[[], None]

    def run(self, sql: str, params: Any = None) -> list[Any]:
        with nullcontext() if self.connection.in_atomic_block else self.bounded():
            return super().run(sql, params)

    def bounded(self) -> AbstractContextManager[None]:
        """Limit lock waits for one transaction: behind a pooler the next has another session."""
        return atomic_with_lock_wait(LOCK_WAIT, using=self.connection.alias)

    def watch(self) -> None:
        body = (
            f"IF TG_OP <> 'INSERT' THEN {self.noted('OLD.')}; END IF; "
            f"IF TG_OP <> 'DELETE' THEN {self.noted('NEW.')}; END IF;"
        )
        self.retry(self.add_trigger, "note", "INSERT OR UPDATE OR DELETE", body)

    def add_trigger(self, name: str, events: str, body: str, each: str = "ROW") -> None:
        name = self.quote(f"{self.new}_{name}")
        # The function runs with its owner's rights: writers have none on the table it writes to.
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
            # DROP TRIGGER would lock partitions before their table, writers lock them after it.
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
    schema, number, watches = "DATABASE()", "AUTO_INCREMENT", 3

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        key = self.quote(self.key[0])
        # INSERT IGNORE would also leave out rows that break a CHECK.
        self.skip_sql = f"ON DUPLICATE KEY UPDATE {key} = {self.n}.{key}"
        self.run("SET SESSION TRANSACTION ISOLATION LEVEL READ COMMITTED")
        self.run(f"SET SESSION lock_wait_timeout = {LOCK_WAIT}, {COPIES}")
        if not self.connection.mysql_is_mariadb:
            self.run("SET SESSION information_schema_stats_expiry = 0")

    def watch(self) -> None:
        for event, *rows in ("INSERT", "NEW."), ("UPDATE", "OLD.", "NEW."), ("DELETE", "OLD."):
            self.retry(self.add_trigger, "note", event, self.noted(*rows))

    def add_trigger(self, name: str, event: str, body: str) -> None:
        trigger = self.quote(f"{self.new}_{name[0]}{event[0]}".lower())
        # A trigger keeps the mode: in a strict one, what an index cannot hold is refused, not cut.
        self.run(f"SET {COPIES[:-1]},STRICT_ALL_TABLES,ALLOW_INVALID_DATES'")
        self.run(f"CREATE TRIGGER {trigger} AFTER {event} ON {self.t} FOR EACH ROW {body}")
        self.run(f"SET {COPIES}")

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
        """Under a lock, copy the last changes; from then on triggers write to both tables."""
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
        """Keep AUTO_INCREMENT where it is: even an unused number is not given out again."""
        [(number,)] = self.run(
            "SELECT auto_increment FROM information_schema.tables "
            "WHERE table_schema = DATABASE() AND table_name = %s",
            [self.table],
        )
        if number is not None and self.pk in self.columns:
            self.run(f"ALTER TABLE {self.n} ALGORITHM = INPLACE, AUTO_INCREMENT = {number}")
