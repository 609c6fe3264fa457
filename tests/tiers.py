"""Tiers, by what a test uses: ``make quick`` runs thousands in a minute, without servers.

``unit``      this process, SQLite
``database``  also the other databases
``system``    also brokers, further processes, private servers, the browser, Spark

The tier of a test is derived from its parameters, its fixtures, and from what its module and
those of its fixtures import. A unit test that starts a process fails; a mark of its own is
stronger: ``@pytest.mark.system``. Tests that ask for pages have the mark ``pages``, too: rendering
pages takes as much time as a third of all other unit tests.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any, NoReturn
from unittest import mock

import pytest
from django.test import Client

from tests.servers.mysql import MARIADB

TIERS = ("unit", "database", "system")
#: Fixtures that lead out of this process.
OUTWARDS = {"chromium", "environment", "java", "rabbitmq_url", "redis_url", "spark"}
DATABASES = {"postgres", MARIADB}
BROKERS = {"redis", "rabbitmq"}
#: Modules that start processes: a test module that imports one, or from one, does.
STARTERS = ("multiprocessing", "subprocess", "tests.forking", "tests.servers")


def tier(item: Any) -> str:
    for name in reversed(TIERS):
        if item.get_closest_marker(name):
            return name
    callspec = getattr(item, "callspec", None)
    texts = {
        each for each in (callspec.params.values() if callspec else ()) if isinstance(each, str)
    }
    if OUTWARDS & set(item.fixturenames) or BROKERS & texts or item.get_closest_marker("slow"):
        return "system"
    if any(map(_starts, modules(item))):
        return "system"
    mark = item.get_closest_marker("django_db")
    databases = mark.kwargs.get("databases") if mark else getattr(item.cls, "databases", None)
    named = texts if databases == "__all__" else texts.union(databases or ())
    return "database" if DATABASES & named or "sender" in item.fixturenames else "unit"


def modules(item: Any) -> list[ModuleType]:
    """Return the module of a test, and those of its fixtures."""
    definitions = item._fixtureinfo.name2fixturedefs
    makers = [definitions[name][-1].func for name in item.fixturenames if name in definitions]
    names = {item.module.__name__, *(maker.__module__ for maker in makers)} - {"tests.conftest"}
    return [sys.modules[name] for name in names if name in sys.modules]


@functools.cache
def _starts(module: ModuleType) -> bool:
    values = vars(module).values()
    names = {getattr(each, "__module__", None) or getattr(each, "__name__", "") for each in values}
    return any(str(name).startswith(STARTERS) for name in names)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[Any]) -> Iterator[Any]:
    for item in items:
        item.add_marker(tier(item))
        if any(each is Client for module in modules(item) for each in vars(module).values()):
            item.add_marker("pages")
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[Any]:
    if not item.get_closest_marker("unit"):
        return (yield)

    def refuse(process: Any, command: Any, *args: Any, **options: Any) -> NoReturn:
        raise AssertionError(f"{item.nodeid} starts {command!r}: mark it system")

    with mock.patch.object(subprocess.Popen, "__init__", refuse):
        return (yield)
