"""Fixtures of the fault tests: database servers that may be killed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from django.db import connections

from tests.servers import PostgreSQL
from tests.servers.mysql import MARIADB, MARIADB_SERVER

from .tools import outbox_on

SERVERS = {"postgres": PostgreSQL, MARIADB: MARIADB_SERVER}


@pytest.fixture(scope="module", params=list(SERVERS))
def private_database(request: pytest.FixtureRequest) -> Iterator[Any]:
    """A database server for this module alone: PostgreSQL, then MariaDB or MySQL."""
    if request.param not in connections:
        pytest.skip(f"no {request.param}")
    with SERVERS[request.param]() as server:
        yield server


@pytest.fixture
def private_alias(private_database: Any, django_db_blocker: Any, settings: Any) -> Iterator[str]:
    """An alias on the private server, migrated and empty, with the outbox on it.

    Not for tests with the mark ``django_db``: the mark knows only the aliases of the settings.
    """
    with outbox_on(private_database.url, django_db_blocker, settings) as alias:
        yield alias
