"""MySQL in the place of MariaDB: ``make test-mysql`` runs each of MariaDB's cases on it.

If MYSQL_URL is set, the alias ``mysql`` takes the place of ``mariadb`` in parameters and marks, and
only its cases run. What is MariaDB's own has the mark ``mariadb_only``. What is MySQL's own names
it, ``on("mysql")``, and runs there alone.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable
from typing import Any

import pytest

from tests.servers.mysql import ON_MYSQL

_RENAMED = {"mariadb": "mysql", "MARIADB_URL": "MYSQL_URL"}


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Say what ``.ci/run`` knows about MySQL."""
    if note := os.environ.get("OUTBOX_TEST_NOTE"):
        terminalreporter.write_line(note)


@pytest.hookimpl(tryfirst=True)
def pytest_generate_tests(metafunc: Any) -> None:
    if ON_MYSQL:
        metafunc.parametrize = functools.partial(_parametrize, metafunc.parametrize)


def _parametrize(
    parametrize: Callable[..., None],
    names: Any,
    values: Iterable[Any],
    *args: Any,
    ids: Any = None,
    **options: Any,
) -> None:
    ids = [_renamed(each) for each in ids] if isinstance(ids, list | tuple) else ids
    parametrize(names, [_renamed(each) for each in values], *args, ids=ids, **options)


def _renamed(value: Any) -> Any:
    if isinstance(value, str):
        return _RENAMED.get(value, value)
    if type(value) is type(pytest.param()):
        id = value.id.replace("mariadb", "mysql") if isinstance(value.id, str) else value.id
        return value._replace(values=tuple(map(_renamed, value.values)), id=id)
    return tuple(map(_renamed, value)) if type(value) is tuple else value


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    for item in items if ON_MYSQL else ():
        mark = item.get_closest_marker("django_db")
        if mark and "mariadb" in mark.kwargs.get("databases", ()):
            databases = [_renamed(each) for each in mark.kwargs["databases"]]
            options = mark.kwargs | {"databases": databases}
            item.add_marker(pytest.mark.django_db(**options), append=False)
    others = {item for item in items if _is_of_mysql(item) != ON_MYSQL}
    if others:
        config.hook.pytest_deselected(items=list(others))
        items[:] = [item for item in items if item not in others]


def _is_of_mysql(item: Any) -> bool:
    """Say whether a test runs on MySQL; without MYSQL_URL, whether it runs there alone."""
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    if not ON_MYSQL:
        return parameters.get("alias") == "mysql"
    if item.get_closest_marker("mariadb_only"):
        return False
    from tests.fixtures.prepared import SENDERS

    alias = parameters.get("alias")
    mark = item.get_closest_marker("django_db")
    databases = mark.kwargs.get("databases", ()) if mark else getattr(item.cls, "databases", ())
    return (
        any(isinstance(each, str) and each in _RENAMED.values() for each in parameters.values())
        or ("sender" in item.fixturenames and SENDERS.get(alias) == "mysql")
        or (alias is None and "mysql" in databases)
    )
