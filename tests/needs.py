"""Which servers a test needs: ``tests.servers --needed`` starts no others.

The needs are derived from the test's marks, parameters and fixtures, and from the servers that its
module and those of its fixtures name: ``"postgres"``, ``redis_url``, ``RABBITMQ_URL``. A test that
then misses another server fails.
"""

from __future__ import annotations

import functools
import inspect
import os
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.servers.mysql import MARIADB
from tests.servers.needed import FILE
from tests.tiers import BROKERS, DATABASES, modules

SERVERS = DATABASES | BROKERS


def pytest_collection_finish(session: pytest.Session) -> None:
    if path := os.environ.get(FILE):
        Path(path).write_text(" ".join(sorted(set().union(*map(needs, session.items)))))


def needs(item: Any) -> set[str]:
    """Return the names of the servers that a test needs."""
    mark = item.get_closest_marker("django_db")
    databases = mark.kwargs.get("databases") if mark else getattr(item.cls, "databases", ())
    if databases == "__all__":
        databases = DATABASES
    callspec = getattr(item, "callspec", None)
    parameters = repr(callspec.params).lower() if callspec else ""
    used = {name for name in SERVERS if name in parameters or f"{name}_url" in item.fixturenames}
    return used.union(SERVERS.intersection(databases or ()), *map(_named, modules(item)))


@functools.cache
def _named(module: ModuleType) -> set[str]:
    """Return the servers that a module of the tests names in a string, or by their address."""
    if not module.__name__.startswith("tests."):
        return set()
    source = inspect.getsource(module).lower()
    source = source.replace("mariadb", MARIADB)
    named = r"\b{0}_url\b|\"{0}\"|servers.mysql import {0}\b"
    return {name for name in SERVERS if re.search(named.format(name), source)}
