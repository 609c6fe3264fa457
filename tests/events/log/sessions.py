"""Sessions that a test drives step by step, each with a connection of its own.

A test decides which transaction does what and when, without sleeping. A step that has to wait for
another session is submitted to ``Session.thread``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

from django.db import connections, transaction
from django.db.models import DateTimeField, Func

from outbox_app.events import NewEvent, publish_many
from outbox_app.events.models import Event
from tests.patience import patience


class Session:
    """A thread with its own connection; each call ends before it returns."""

    def __init__(self, alias: str) -> None:
        self.alias = alias
        self.blocks: list[Any] = []
        self.thread = ThreadPoolExecutor(1)

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exception: object) -> None:
        while self.blocks:
            self.rollback()
        self.do(lambda: connections[self.alias].close())
        self.thread.shutdown()

    def do(self, step: Callable[[], Any]) -> Any:
        return self.thread.submit(step).result(patience())

    def begin(self) -> Session:
        """Open a transaction; inside one, a savepoint."""
        block = transaction.atomic(using=self.alias)
        self.do(block.__enter__)
        self.blocks.append(block)
        return self

    def commit(self) -> None:
        block = self.blocks.pop()
        self.do(lambda: block.__exit__(None, None, None))

    def rollback(self) -> None:
        self.do(lambda: transaction.set_rollback(True, using=self.alias))
        self.commit()

    def publish(self, stream: str, count: int = 1, **options: Any) -> list[int]:
        """Publish events of one stream. Returns their positions."""
        type = options.pop("type", "happened")
        events = [NewEvent(stream, type, {"n": n}, **options) for n in range(count)]
        rows = self.do(lambda: publish_many(events, using=self.alias))
        versions = [row.version for row in rows]
        found = Event.objects.using(self.alias).filter(stream=stream, version__in=versions)
        return self.do(lambda: list(found.order_by("id").values_list("id", flat=True)))

    def sql(self, sql: str, *params: Any) -> list[Any]:
        return self.do(lambda: execute(self.alias, sql, *params))

    def assign_xid(self) -> None:
        """As if something else was written before: the transaction gets its id now."""
        if connections[self.alias].vendor == "postgresql":
            self.sql("SELECT pg_current_xact_id()")

    def age(self, seconds: int) -> None:
        """As if what it has just published was written so long ago."""
        events = Event.objects.using(self.alias)
        ago = Ago(seconds=seconds)
        self.do(lambda: events.filter(pk=events.latest("pk").pk).update(recorded_at=ago))


def execute(alias: str, sql: str, *params: Any) -> list[Any]:
    """Run a statement on this thread's connection. Returns its rows."""
    return run(alias, sql, params or None)


def run(alias: str, sql: str, params: Any) -> list[Any]:
    """The same for a window: ``%`` is written twice, whether there are parameters or not."""
    with connections[alias].cursor() as cursor:
        cursor.execute(sql, params)
        return list(cursor.fetchall()) if cursor.description else []


@contextmanager
def foreign_transaction() -> Iterator[None]:
    """In another database of the same PostgreSQL cluster a transaction is open, and has written."""
    import psycopg

    own = connections["postgres"].get_connection_params()
    keep = {key: own[key] for key in ("host", "port", "user", "password") if own.get(key)}
    with psycopg.connect(dbname="postgres", **keep) as connection:
        connection.execute("SELECT pg_current_xact_id()")
        yield
        connection.rollback()


def truncate(alias: str) -> None:
    """Make the log new on MySQL, so that nothing is locked but what the test locks.

    Deleted rows that are not purged yet make a writer of the same stream and version lock the gap
    before it, where others then cannot write.
    """
    if connections[alias].vendor == "mysql":
        execute(alias, "TRUNCATE TABLE outbox_event")
        execute(alias, "TRUNCATE TABLE outbox_stream")


class Ago(Func):
    """The database's time so many seconds ago."""

    template = "clock_timestamp() - make_interval(secs => %(seconds)s)"
    arity = 0
    output_field = DateTimeField()

    def as_mysql(self, compiler: Any, connection: Any, **context: Any) -> Any:
        template = "UTC_TIMESTAMP(6) - INTERVAL %(seconds)s SECOND"
        return self.as_sql(compiler, connection, template=template, **context)
