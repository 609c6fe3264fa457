"""Two private PostgreSQL servers, and databases that move between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from uuid import uuid4

import pytest
from django.core.management import call_command
from django.db import connections

from tests.faults.tools import alias_for
from tests.servers import PostgreSQL
from tests.servers.transfer import dump, restore


@pytest.fixture(scope="module")
def servers() -> Iterator[tuple[PostgreSQL, PostgreSQL]]:
    """Two clusters."""
    if "postgres" not in connections:
        pytest.skip("no postgres")
    with PostgreSQL() as first, PostgreSQL() as second:
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

    def run_sql(self, sql: str) -> None:
        with connections[self.alias].cursor() as cursor:
            cursor.execute(sql)

    def overtake(self, server: PostgreSQL) -> None:
        """Let the cluster that it is on give out more transaction ids than another has."""
        with alias_for(server.url) as other:
            count = max(0, _next_id(other) - _next_id(self.alias)) + 500
        self.run_sql(
            f"DO $$ BEGIN FOR i IN 1..{count} LOOP PERFORM pg_current_xact_id(); COMMIT; "
            "END LOOP; END $$"
        )

    def _use(self, server: PostgreSQL, name: str) -> None:
        self._on, self._name = server, name
        url = server.url.removesuffix("/outbox") + f"/{name}"
        self.alias = self.stack.enter_context(alias_for(url))
        self.settings.OUTBOX = {**self.settings.OUTBOX, "DATABASE": self.alias}


def _next_id(alias: str) -> int:
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT pg_snapshot_xmax(pg_current_snapshot())::text::bigint")
        return int(cursor.fetchone()[0])


@pytest.fixture
def databases(django_db_blocker: Any, settings: Any) -> Iterator[Databases]:
    """Not for tests with the mark ``django_db``: it knows only the aliases of the settings."""
    with django_db_blocker.unblock(), ExitStack() as stack:
        yield Databases(settings, stack)


@pytest.fixture
def publish_now(databases: Databases) -> Callable[..., None]:
    """``publish_now("a", "b")``: commit one transaction in the outbox's present database."""
    from django.db import transaction

    from outbox_app import NewEvent, publish_many

    def make(*streams: str, **options: Any) -> None:
        with transaction.atomic(using=databases.alias):
            publish_many((NewEvent(stream, "made") for stream in streams), **options)

    return make
