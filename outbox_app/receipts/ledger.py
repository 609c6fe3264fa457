"""The statements of a worker process about its runs, each in autocommit, on their own connection.

Celery's Django fixup closes every connection of Django before and after each task. It does not see
this one, a copy. One statement at a time: threads and greenlets wait for each other, so none waits
for a lock for long.

``begin`` inserts the run with one statement that reads the row of the job and locks it against
deletion: who deletes the row (``cancel()``, a person, a drainer that gives the job up) locks it
first and looks for a run then, so a job is either deleted or begun.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, NamedTuple

from django.db import connections

from ..database.clock import later_sql, now_sql
from ..models import InboxEntry, Run, StagedJob

#: Seconds for which a connection is waited for.
CONNECT_SECONDS = 5
#: Seconds for which a statement waits for a row that another transaction has locked.
LOCK_SECONDS = 2
#: PostgreSQL's bound, as a condition: a session may be another client's in a moment, at a pooler.
BOUNDED = f"(SELECT set_config('lock_timeout', '{LOCK_SECONDS}s', true)) IS NOT NULL"


class Address(NamedTuple):
    """A row of a job, as the header names it, with the task id, as ids may be given out again."""

    id: int
    alias: str
    task_id: str

    @classmethod
    def read(cls, header: object, task_id: str) -> Address | None:
        """Return the address; None for no header, or one that names no row of this task id.

        Tasks pass the headers of their request on to other tasks.
        """
        id, _, rest = header.partition("@") if isinstance(header, str) else ("", "", "")
        alias = rest.removesuffix(f"@{task_id}")
        return cls(int(id), alias, task_id) if id.isdecimal() and alias != rest else None


class Seen(NamedTuple):
    """A job that could not be begun, and the run that it has, if any."""

    token: str | None
    attempts: int | None
    retries: int | None
    lease_until: Any
    is_over: bool | None


class Ledger:
    """The statements of one process on one alias."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self._lock = threading.RLock()
        self._connection: Any = None
        quote = connections[alias].ops.quote_name
        models = {"j": StagedJob, "r": Run, "i": InboxEntry}
        self._names = {name: quote(model._meta.db_table) for name, model in models.items()}
        self._names["now"] = now_sql(alias)
        self.vendor = connections[alias].vendor
        self._names["bounded"] = BOUNDED if self.vendor == "postgresql" else "TRUE"

    def begin(
        self, job: Address, *, worker: str, token: str, retries: int, seconds: float
    ) -> int | None:
        """Begin a job, unless its row is gone, or a worker runs it. Return which attempt it is."""
        values = ["worker", "token", "retries", "started_at", "lease_until"]
        insert = (
            "INSERT INTO {r} (staged_id, attempts, worker, token, retries, started_at, lease_until)"
            f" SELECT id, 1, %s, %s, %s, {{now}}, {later_sql(f'{seconds:g}', self.alias)}"
            " FROM {j} WHERE id = %s AND task_id = %s AND {bounded}"
        )
        params: list[Any] = [worker[:255], token, retries, job.id, job.task_id]
        if self.vendor == "mysql":
            # ``lease_until`` last: MySQL assigns from left to right.
            taken = ", ".join(
                f"{name} = IF(lease_until < {{now}}, {new}, {name})"
                for name, new in [
                    ("attempts", "attempts + 1"),
                    *((name, f"VALUES({name})") for name in values),
                ]
            )
            sql = f"{insert} LOCK IN SHARE MODE ON DUPLICATE KEY UPDATE {taken}"
            with self._cursor() as cursor:
                self._run(cursor, sql, params)
                sql = "SELECT attempts FROM {r} WHERE staged_id = %s AND token = %s"
                self._run(cursor, sql, [job.id, token])
                found = cursor.fetchone()
        else:
            taken = ", ".join(f"{name} = EXCLUDED.{name}" for name in values)
            lock = " FOR KEY SHARE" if self.vendor == "postgresql" else ""
            sql = (
                f"{insert}{lock} ON CONFLICT (staged_id) DO UPDATE SET "
                f"attempts = {{r}}.attempts + 1, {taken} WHERE {{r}}.lease_until < {{now}} "
                "RETURNING attempts"
            )
            with self._cursor() as cursor:
                self._run(cursor, sql, params)
                found = cursor.fetchone()
        return found[0] if found else None

    def look(self, job: Address) -> Seen | None:
        """Return the job's run, with empty fields if there is none; None if the job is gone."""
        sql = (
            "SELECT r.token, r.attempts, r.retries, r.lease_until, r.lease_until < {now} "
            "FROM {j} j LEFT JOIN {r} r ON r.staged_id = j.id WHERE j.id = %s AND j.task_id = %s"
        )
        with self._cursor() as cursor:
            self._run(cursor, sql, [job.id, job.task_id])
            found = cursor.fetchone()
        return Seen._make(found) if found else None

    def renew(self, runs: Sequence[tuple[int, str]], *, seconds: float) -> None:
        """Move the leases of runs (ids and tokens) on; those of others, or gone, stay."""
        ids, tokens = (", ".join(["%s"] * len(runs)) for _ in range(2))
        sql = (
            f"UPDATE {{r}} SET lease_until = {later_sql(f'{seconds:g}', self.alias)} "
            f"WHERE staged_id IN ({ids}) AND token IN ({tokens}) AND {{bounded}}"
        )
        with self._cursor() as cursor:
            self._run(cursor, sql, [*(id for id, _ in runs), *(token for _, token in runs)])

    def end(self, job: Address, *, has_entry: bool = False) -> None:
        """Delete the row of an ended job, its run, and its entry in the inbox of this alias."""
        # Ids may be given out again: the run may be that of another job.
        run = (
            "DELETE FROM {r} WHERE staged_id = %s AND {bounded} "
            "AND NOT EXISTS (SELECT 1 FROM {j} WHERE id = %s AND task_id <> %s)"
        )
        of_run = [job.id, job.id, job.task_id]
        if self.vendor == "postgresql":
            entry = "e AS (DELETE FROM {i} WHERE job_id = %s), " if has_entry else ""
            sql = (
                f"WITH {entry}r AS ({run}) "
                "DELETE FROM {j} WHERE id = %s AND task_id = %s AND {bounded}"
            )
            params = [job.task_id] * has_entry + [*of_run, job.id, job.task_id]
            with self._cursor() as cursor:
                self._run(cursor, sql, params)
            return
        # The row first: without it, no other worker begins the job, even if this one ends here.
        with self._cursor() as cursor:
            sql = "DELETE FROM {j} WHERE id = %s AND task_id = %s"
            self._run(cursor, sql, [job.id, job.task_id])
            self._run(cursor, run, of_run)
            if has_entry:
                self._run(cursor, "DELETE FROM {i} WHERE job_id = %s", [job.task_id])

    def drop(self, job: Address, token: str, *, retry_in: float | None = None) -> None:
        """Delete a run, and keep its job; with ``retry_in``, a retry was sent for so many seconds.

        The limit begins then, and so the row counts as sent then.
        """
        with self._cursor() as cursor:
            if retry_in is not None:
                due = later_sql(f"{retry_in:.3f}", self.alias)
                later = later_sql(f"receipt + {retry_in:.3f}", self.alias)
                sql = (
                    f"UPDATE {{j}} SET available_at = {later}, publishes = 1, sent_at = {due}, "
                    "is_immediate = NULL WHERE id = %s AND task_id = %s AND {bounded}"
                )
                self._run(cursor, sql, [job.id, job.task_id])
            sql = "DELETE FROM {r} WHERE staged_id = %s AND token = %s AND {bounded}"
            self._run(cursor, sql, [job.id, token])

    def close(self) -> None:
        with self._lock:
            connection, self._connection = self._connection, None
            if connection is not None:
                with suppress(Exception):  # a broken connection may fail in any way
                    connection.close()

    def _run(self, cursor: Any, sql: str, params: list[Any]) -> None:
        cursor.execute(sql.format(**self._names), params)

    @contextmanager
    def _cursor(self) -> Iterator[Any]:
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = self._connect()
                with self._connection.cursor() as cursor:
                    yield cursor
            except BaseException:  # also a time limit's, between a statement and its answer
                self.close()
                raise

    def _connect(self) -> Any:
        connection: Any = connections[self.alias].copy()
        connection.inc_thread_sharing()
        options = connection.settings_dict["OPTIONS"]
        options.pop("pool", None)
        if self.vendor != "sqlite":
            options.setdefault("connect_timeout", CONNECT_SECONDS)
        connection.settings_dict["AUTOCOMMIT"] = True
        if self.vendor == "mysql":
            with connection.cursor() as cursor:
                cursor.execute(f"SET SESSION innodb_lock_wait_timeout = {LOCK_SECONDS}")
        return connection
