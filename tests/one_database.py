"""One database for what is refused before any SQL: ``@pytest.mark.any_database``.

Which one follows from the test's own id, so each run has the same, and every database gets its
share. ``ALL_DATABASES=1`` runs all. A marked test shows with ``no_statement`` that none was asked.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from django.conf import settings
from django.db import connections
from django.test.utils import CaptureQueriesContext


@contextmanager
def no_statement(using: str) -> Iterator[None]:
    """Fail if the block executes a statement on a database."""
    with CaptureQueriesContext(connections[using]) as statements:
        yield
    assert [each["sql"] for each in statements] == []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if os.environ.get("ALL_DATABASES"):
        return
    others = [item for item in items if item.get_closest_marker("any_database") and _spared(item)]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if item not in set(others)]


def _spared(item: Any) -> bool:
    """Whether another database than this parameter's proves it."""
    there = sorted(settings.DATABASES)
    id = item.nodeid
    for name in ("sqlite", "postgres", "mariadb", "mysql"):
        id = id.replace(name, "")
    return item.callspec.params["alias"] != there[zlib.crc32(id.encode()) % len(there)]
