"""Fixtures of all tiers: the three databases, the two brokers, Celery apps.

A test with the fixture ``alias`` runs once on each database, with the outbox on it. It gets the
mark ``django_db`` for that alias alone, so Django refuses code that forgets its ``using``. To let a
test commit, mark it ``django_db(transaction=True)``; for several aliases add ``databases=``.

If a service is missing, its tests are skipped on a laptop, and fail in CI and where the services
were chosen for the tests (``tests.servers --needed``).
"""

from __future__ import annotations

import math
import os
import signal
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, NoReturn
from urllib.parse import urlsplit, urlunsplit
from uuid import uuid4

import pytest
from django.conf import settings as django_settings
from django.db import connections, transaction

from tests import emptying
from tests.pipeline import classes
from tests.servers.mysql import MARIADB
from tests.servers.needed import CHOSEN

if TYPE_CHECKING:
    from pytest_django.fixtures import Settings

    from outbox_app.celery import OutboxCelery

#: Fixtures that several folders share, and plugins that choose where each test runs.
pytest_plugins = [
    "tests.fixtures.admin",
    "tests.fixtures.door",
    "tests.fixtures.drainers",
    "tests.fixtures.entities",
    "tests.fixtures.facts",
    "tests.fixtures.prepared",
    "tests.fixtures.spark",
    "tests.fixtures.subscriptions",
    "tests.on_mysql",
    "tests.one_database",
    "tests.tiers",
    "tests.needs",  # which imports tests.tiers
    "tests.workers",
]

ALIASES = {"sqlite": "default", "postgres": "postgres", "mariadb": "mariadb"}
VARIABLES = {
    "default": "SQLITE_FILE",
    "postgres": "POSTGRES_URL",
    MARIADB: f"{MARIADB.upper()}_URL",
}
os.environ.setdefault("SPARK_SUBMIT_OPTS", classes.options())


@pytest.fixture(scope="session", autouse=True)
def tests_end_by_themselves() -> None:
    """See ``tests.emptying``."""
    emptying.replace_teardown()


@pytest.fixture(scope="session", autouse=True)
def tasks_look_for_no_drainer() -> None:
    """Else one of the tests that count queries would, once a minute, count one more."""
    from outbox_app.monitoring import no_drainer

    no_drainer._last_look[:] = struct.pack("d", math.inf)


@pytest.fixture(scope="session")
def django_db_setup(time_left: float, django_db_setup: None) -> None:
    """pytest-django's fixture, outside the first test's time limit: if it fails, all tests do."""
    signal.setitimer(signal.ITIMER_REAL, time_left)


@pytest.fixture(scope="session")
def time_left() -> float:
    """Stop the time limit of the test that is being set up. Returns the seconds that are left."""
    return signal.setitimer(signal.ITIMER_REAL, 0)[0]


@pytest.fixture(params=[pytest.param(alias, id=name) for name, alias in ALIASES.items()])
def alias(request: pytest.FixtureRequest, settings: Settings) -> str:
    """The database alias under test; the setting OUTBOX["DATABASE"] names it."""
    settings.OUTBOX = {**settings.OUTBOX, "DATABASE": request.param}
    return request.param


@pytest.fixture
def pool_of_one(alias: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The alias (of PostgreSQL) uses Django's pool, with one connection."""
    pytest.importorskip("psycopg_pool")
    connection: Any = connections[alias]
    connection.close()
    pool = {"min_size": 1, "max_size": 1, "timeout": 20}
    monkeypatch.setitem(connection.settings_dict["OPTIONS"], "pool", pool)
    yield
    connection.close()
    connection.close_pool()


@pytest.fixture
def in_atomic(request: pytest.FixtureRequest) -> Iterator[None]:
    """The test runs inside an ``atomic()`` block, because outbox_app ignores the test case's own.

    A test that commits (``transaction=True``) opens its own block.
    """
    mark = request.node.get_closest_marker("django_db")
    commits = mark.kwargs.get("transaction") if mark else False
    alias = _alias(request.node) or "default"
    with nullcontext() if commits else transaction.atomic(using=alias):
        yield


@pytest.fixture
def environment() -> Callable[[str], dict[str, str]]:
    """``environment(alias)``: variables for a process that uses the test's databases.

    The process runs under ``tests.settings`` with its outbox on ``alias``. Only a test with
    ``transaction=True`` commits rows that the process can see.
    """

    def make(alias: str) -> dict[str, str]:
        variables = {"DJANGO_SETTINGS_MODULE": "tests.settings", "OUTBOX_ALIAS": alias}
        for name in django_settings.DATABASES:
            database = str(connections[name].settings_dict["NAME"])
            if name != "default":
                url = urlsplit(os.environ[VARIABLES[name]])
                database = urlunsplit(url._replace(path=f"/{database}"))
            variables[VARIABLES[name]] = database
        return {**os.environ, **variables}

    return make


@pytest.fixture
def redis_url() -> str:
    """The database at REDIS_URL, emptied."""
    import redis

    url = _service("REDIS_URL")
    with redis.Redis.from_url(url) as client:
        client.flushdb()
    return url


@pytest.fixture
def rabbitmq_url() -> str:
    """The address of RabbitMQ. Tests share it: name queues uniquely, as ``make_app`` does."""
    return _service("RABBITMQ_URL")


@pytest.fixture
def make_app() -> Iterator[Callable[..., OutboxCelery]]:
    """``make_app(broker_url="memory://", **conf)``: an OutboxCelery, closed after the test.

    The app and its default queue have the same, unique name. The app does not become the current
    app.
    """
    from kombu.transport import memory

    from outbox_app.celery import OutboxCelery

    apps: list[OutboxCelery] = []

    def make(broker_url: str = "memory://", **conf: Any) -> OutboxCelery:
        name = f"app-{uuid4().hex[:12]}"
        app = OutboxCelery(name, broker=broker_url, set_as_current=False)
        app.conf.update({"task_default_queue": name, **conf})
        apps.append(app)
        return app

    yield make
    for app in apps:
        app.close()
    memory.Transport.global_state.clear()
    memory.Channel.queues.clear()


@pytest.fixture(autouse=True)
def tasks_end_with_the_test() -> Iterator[None]:
    """Forget tasks defined by ``@app.task``: Celery shares them with every app that is made later.

    Tasks defined by ``@shared_task`` stay, because a module is imported only once.
    """
    from celery import _state

    shared: set[Any] = _state._on_app_finalizers
    before = set(shared)
    yield
    shared -= {each for each in shared - before if each.__qualname__.startswith("Celery.task")}


@pytest.fixture(autouse=True)
def subscriptions_end_with_the_test() -> Iterator[None]:
    """Forget the subscriptions that a test, or code of the documentation, has declared."""
    from outbox_app.events.subscriptions import subscriber

    before = dict(subscriber._subscribers)
    yield
    subscriber._subscribers.clear()
    subscriber._subscribers.update(before)


@pytest.fixture(autouse=True)
def timeouts_end_with_the_test() -> Iterator[None]:
    """Undo the timeouts that a command has given to its process: a later test may wait longer."""
    given = [
        (alias, each["OPTIONS"], {**each["OPTIONS"]})
        for alias, each in connections.settings.items()
    ]
    yield
    for alias, options, before in given:
        if options != before:
            options.clear()
            options.update(before)
            connections[alias].close()


@pytest.fixture(autouse=True)
def counters_begin_with_the_test() -> None:
    """Clear the process's counters: it writes them every ten seconds, also in tests that count."""
    if counters := sys.modules.get("outbox_app.process.counters"):
        counters._shared.clear()


@pytest.fixture
def new_log(request: pytest.FixtureRequest) -> None:
    """A log without deleted rows on MariaDB, for tests in which several writers hold rows.

    The flush after an earlier test deletes rows. Until MariaDB has purged them, a writer of the
    same stream and version locks the gap before them, and another waits longer than a test does.
    """
    alias = _alias(request.node)
    if alias == MARIADB:
        with connections[alias].cursor() as cursor:
            cursor.execute("TRUNCATE TABLE outbox_event")
            cursor.execute("TRUNCATE TABLE outbox_stream")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if (alias := _alias(item)) in django_settings.DATABASES:
            mark = item.get_closest_marker("django_db")
            options = {"databases": [alias], **(mark.kwargs if mark else {})}
            item.add_marker(pytest.mark.django_db(**options), append=False)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    mark = item.get_closest_marker("django_db")
    named = mark.kwargs.get("databases", ()) if mark else ()
    callspec = getattr(item, "callspec", None)
    texts = [p for p in (callspec.params.values() if callspec else ()) if isinstance(p, str)]
    for alias in VARIABLES.keys() - django_settings.DATABASES.keys():
        if alias in named or alias in texts:
            _missing(VARIABLES[alias])


def _alias(item: Any) -> str | None:
    callspec = getattr(item, "callspec", None)
    return callspec.params.get("alias") if callspec else None


@pytest.fixture
def new_database(
    request: pytest.FixtureRequest, django_db_blocker: Any
) -> Iterator[dict[str, object]]:
    """An entry of DATABASES for a new database on the server of an alias.

    The alias is the parameter. For SQLite the entry is empty: choose a file.
    """
    import environ

    if request.param == "default":
        yield {}
        return
    if request.param not in connections:
        pytest.skip(f"no {request.param}")
    name = f"new_{uuid4().hex[:8]}"
    with django_db_blocker.unblock(), connections[request.param]._nodb_cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name}")
        yield {**environ.Env.db_url_config(_service(VARIABLES[request.param])), "NAME": name}
        cursor.execute(f"DROP DATABASE {name}")


def _service(variable: str) -> str:
    return os.environ.get(variable) or _missing(variable)


def _missing(variable: str) -> NoReturn:
    reason = f"{variable} is not set; try: python -m tests.servers run -- python -m pytest"
    if chosen := os.environ.get(CHOSEN):
        reason = f"{variable} is not set: tests.needs has found that the tests need {chosen}"
    if chosen or os.environ.get("CI"):
        pytest.fail(reason, pytrace=False)
    pytest.skip(reason)
