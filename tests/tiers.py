"""Tiers, by what a test uses: ``-m unit`` runs thousands in a minute, without servers.

``unit``      this process, SQLite
``database``  also the other databases
``system``    also brokers, further processes, private servers, the browser, Spark

The tier of a test is derived from its parameters, its fixtures, and from what its module and
those of its fixtures import. A unit test that starts a process fails; a mark of its own is
stronger: ``@pytest.mark.system``.
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, NoReturn
from unittest import mock

import pytest

TIERS = ("unit", "database", "system")
#: Fixtures that lead out of this process.
OUTWARDS = {"chromium", "environment", "java", "rabbitmq_url", "redis_url", "spark"}
#: Modules that start processes: a test module that imports one, or from one, does.
STARTERS = ("multiprocessing", "subprocess", "tests.forking", "tests.servers")


def tier(item: Any) -> str:
    for name in reversed(TIERS):
        if item.get_closest_marker(name):
            return name
    definitions = item._fixtureinfo.name2fixturedefs
    makers = [definitions[name][-1].func for name in item.fixturenames if name in definitions]
    modules = {item.module.__name__, *(maker.__module__ for maker in makers)} - {"tests.conftest"}
    if OUTWARDS & set(item.fixturenames) or item.get_closest_marker("slow"):
        return "system"
    if any(_starts(sys.modules.get(name)) for name in modules):
        return "system"
    callspec = getattr(item, "callspec", None)
    alias = callspec.params.get("alias", "default") if callspec else "default"
    return "database" if alias != "default" or "sender" in item.fixturenames else "unit"


@functools.cache
def _starts(module: Any) -> bool:
    values = vars(module).values() if module else ()
    names = {getattr(each, "__module__", None) or getattr(each, "__name__", "") for each in values}
    return any(str(name).startswith(STARTERS) for name in names)


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[Any]) -> Iterator[Any]:
    for item in items:
        item.add_marker(tier(item))
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[Any]:
    if not item.get_closest_marker("unit"):
        return (yield)

    def refuse(process: Any, command: Any, *args: Any, **options: Any) -> NoReturn:
        raise AssertionError(f"{item.nodeid} starts {command!r}: mark it system")

    with mock.patch.object(subprocess.Popen, "__init__", refuse):
        return (yield)
