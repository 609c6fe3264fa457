"""Fixtures of the fault tests: database servers that may be killed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections

from outbox_app.models import StagedJob
from tests import emptying
from tests.servers import MariaDB, PostgreSQL

from .tools import alias_for

SERVERS = {"postgres": PostgreSQL, "mariadb": MariaDB}


@pytest.fixture(scope="module", params=list(SERVERS))
def private_database(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A database server of this module's own: PostgreSQL, then MariaDB."""
    if request.param not in connections:
        pytest.skip(f"no {request.param}")
    with SERVERS[request.param]() as server:
        yield server


@pytest.fixture
def private_alias(private_database: Any, django_db_blocker: Any, settings: Any) -> Iterator[str]:
    """An alias on the private server, migrated and empty, with the outbox on it.

    Not for tests with the mark ``django_db``: that knows the aliases of the settings only.
    """
    with django_db_blocker.unblock(), alias_for(private_database.url) as alias:
        if StagedJob._meta.db_table not in connections[alias].introspection.table_names():
            call_command("migrate", database=alias, verbosity=0)
        emptying.empty(alias)
        settings.OUTBOX = {**settings.OUTBOX, "DATABASE": alias}
        yield alias
