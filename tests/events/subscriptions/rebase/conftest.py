"""Two private PostgreSQL servers, and databases that move between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from uuid import uuid4

import pytest
from django.core.management import call_command
from django.core.management.color import no_style
from django.db import connections

from tests.faults.tools import alias_for
from tests.patience import eventually
from tests.servers import PostgreSQL
from tests.servers.transfer import dump, restore
from tests.tables import every_model


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[PostgreSQL, PostgreSQL]]:
    """Two clusters; each can follow the other."""
    if "postgres" not in connections:
        pytest.skip("no postgres")
    logical = ["-c", "wal_level=logical"]
    with (
        PostgreSQL(extra_arguments=logical) as first,
        PostgreSQL(extra_arguments=logical) as second,
    ):
        yield first, second


class Databases:
    """Databases on private servers: one is made, then moved by dump and restore."""

    def __init__(self, settings: Any, stack: ExitStack) -> None:
        self.settings = settings
        self.stack = stack
        self.alias = ""
        self._on: PostgreSQL | None = None
        self._name = ""

    def make(self, server: PostgreSQL) -> str:
        """Make a database with the outbox in it."""
        name = f"db_{uuid4().hex[:8]}"
        with (
            alias_for(server.url) as maintenance,
            connections[maintenance].cursor() as cursor,
        ):
            cursor.execute(f"CREATE DATABASE {name}")
        self._use(server, name)
        call_command("migrate", database=self.alias, verbosity=0, skip_checks=True)
        return self.alias

    def move(self, server: PostgreSQL) -> str:
        """Dump what there is now, and restore it on a server. The outbox is there from now on."""
        assert self._on
        file, name = dump(self._on, self._name), f"db_{uuid4().hex[:8]}"
        restore(server, file, name)
        self._use(server, name)
        return self.alias

    @contextmanager
    def switch_over(self, server: PostgreSQL) -> Iterator[None]:
        """Copy all to a server and let it follow until the end of the block; then use it."""
        assert self._on
        old, source, name = self.alias, self._name, f"db_{uuid4().hex[:8]}"
        restore(server, dump(self._on, source, "--schema-only"), name)
        self.run_sql("CREATE PUBLICATION everything FOR ALL TABLES")
        where = f"'host=127.0.0.1 port={self._on.port} user=outbox dbname={source}'"
        url = server.url.removesuffix("/outbox") + f"/{name}"
        with alias_for(url) as new, connections[new].cursor() as cursor:
            cursor.execute(f"CREATE SUBSCRIPTION {name} CONNECTION {where} PUBLICATION everything")
            ready = "SELECT bool_and(srsubstate = 'r') FROM pg_subscription_rel"
            eventually(lambda: cursor.execute(ready) and cursor.fetchone()[0], "all is copied")
            yield
            self.run_sql("CREATE TABLE the_end ()")
            last = _asked(old, "SELECT pg_current_wal_lsn()")
            reached = f"SELECT replay_lsn >= '{last}' FROM pg_stat_replication"
            eventually(lambda: _asked(old, reached), "all is replicated")
            cursor.execute(f"DROP SUBSCRIPTION {name}")
            models = every_model()
            for sql in connections[new].ops.sequence_reset_sql(no_style(), models):
                cursor.execute(sql)
        self._use(server, name)

    def run_sql(self, sql: str) -> None:
        with connections[self.alias].cursor() as cursor:
            cursor.execute(sql)

    def overtake(self, server: PostgreSQL) -> None:
        """Let the cluster that it is on give out more transaction ids than another has."""
        with alias_for(server.url) as other:
            _overtake(self.alias, other)

    def be_overtaken(self, server: PostgreSQL) -> None:
        with alias_for(server.url) as other:
            _overtake(other, self.alias)

    def _use(self, server: PostgreSQL, name: str) -> None:
        self._on, self._name = server, name
        url = server.url.removesuffix("/outbox") + f"/{name}"
        self.alias = self.stack.enter_context(alias_for(url))
        self.settings.OUTBOX = {**self.settings.OUTBOX, "DATABASE": self.alias}


def _overtake(alias: str, other: str) -> None:
    upto = "SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint"
    count = max(0, _asked(other, upto) - _asked(alias, upto)) + 500
    with connections[alias].cursor() as cursor:
        cursor.execute(
            f"DO $$ BEGIN FOR i IN 1..{count} LOOP PERFORM pg_current_xact_id(); COMMIT; "
            "END LOOP; END $$"
        )


def _asked(alias: str, sql: str) -> Any:
    with connections[alias].cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchone()[0]


@pytest.fixture
def databases(django_db_blocker: Any, settings: Any) -> Iterator[Databases]:
    """Not for tests with the mark ``django_db``: it knows only the aliases of the settings."""
    with django_db_blocker.unblock(), ExitStack() as stack:
        yield Databases(settings, stack)


@pytest.fixture
def publish_now(databases: Databases) -> Callable[..., None]:
    """``publish_now("a", "b")``: commit one transaction in the outbox's present database."""
    from django.db import transaction

    from outbox_app.events import NewEvent, publish_many

    def make(*streams: str, **options: Any) -> None:
        with transaction.atomic(using=databases.alias):
            publish_many((NewEvent(stream, "made") for stream in streams), **options)

    return make
