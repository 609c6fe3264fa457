"""Fixtures of the fault tests: apps, real drainers, private servers that may be killed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
from celery import Celery
from django.core.management import call_command
from django.db import connections

from outbox_app.models import StagedJob
from tests.servers import MariaDB, PostgreSQL, Proxy, RabbitMQ, Redis

from . import project
from .tools import QUICK, Book, Subprocess


@pytest.fixture
def quick(settings: Any) -> Callable[..., None]:
    """``quick(**outbox)``: short leases in this process, as ``start_drainer`` gives to others."""

    def apply(**outbox: Any) -> None:
        settings.OUTBOX = {**settings.OUTBOX, **QUICK, **outbox}

    apply()
    return apply


@pytest.fixture
def make_named_app() -> Iterator[Callable[[str], Celery]]:
    """``make_named_app(broker_url)``: an app that a drainer in another process has too."""
    apps: list[Celery] = []

    def make(broker: str) -> Celery:
        apps.append(project.make(f"faults-{uuid4().hex[:12]}", broker))
        return apps[-1]

    yield make
    for app in apps:
        app.close()


@pytest.fixture
def start_drainer(environment: Any, tmp_path: Any) -> Iterator[Callable[..., Subprocess]]:
    """``start_drainer(alias, app, *arguments, outbox={}, **environment)``: a real process."""
    started: list[Subprocess] = []

    def start(
        alias: str,
        *apps_and_arguments: Any,
        outbox: Any = None,
        wrap: Any = (),
        **variables: str,
    ) -> Subprocess:
        apps = [a for a in apps_and_arguments if isinstance(a, Celery)]
        arguments = [a for a in apps_and_arguments if not isinstance(a, Celery)]
        brokers = {app.main: app.conf.broker_url for app in apps}
        process = Subprocess(
            *arguments,
            environment={
                **environment(alias),
                **project.variables(brokers, **{**QUICK, **(outbox or {})}),
                **variables,
            },
            log=tmp_path / f"drainer-{len(started)}.log",
            wrap=wrap,
        )
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()


@contextmanager
def alias_for(url: str) -> Iterator[str]:
    """A further alias for the time of the block: a database of a private server, migrated."""
    alias = f"private_{uuid4().hex[:8]}"
    parts = urlsplit(url)
    like = {"postgres": "postgres", "mysql": "mariadb"}[parts.scheme]
    connections.settings[alias] = {
        **deepcopy(connections.settings[like]),
        "NAME": parts.path.lstrip("/"),
        "USER": parts.username,
        "PASSWORD": parts.password or "",
        "HOST": parts.hostname,
        "PORT": str(parts.port),
    }
    try:
        yield alias
    finally:
        connections[alias].close()
        del connections[alias]
        del connections.settings[alias]


@pytest.fixture(scope="module")
def private_redis() -> Iterator[Redis]:
    """A server of this module's own, whose data survive a kill."""
    with Redis(extra_arguments=("--appendonly", "yes", "--appendfsync", "always")) as server:
        yield server


@pytest.fixture(scope="module")
def private_rabbitmq() -> Iterator[RabbitMQ]:
    """A server of this module's own."""
    with RabbitMQ() as server:
        yield server


@pytest.fixture
def proxy() -> Iterator[Callable[[str], tuple[Proxy, str]]]:
    """``proxy(url)``: a proxy before the server at ``url``, and its address."""
    with ExitStack() as stack:

        def make(url: str) -> tuple[Proxy, str]:
            parts = urlsplit(url)
            assert parts.hostname
            assert parts.port
            made = stack.enter_context(Proxy(parts.hostname, parts.port))
            return made, url.replace(f":{parts.port}", f":{made.port}")

        yield make


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
        call_command(
            "flush", database=alias, interactive=False, verbosity=0, inhibit_post_migrate=True
        )
        settings.OUTBOX = {**settings.OUTBOX, "DATABASE": alias}
        yield alias


@pytest.fixture
def book() -> Callable[[str], Book]:
    """``book(alias)``: what was staged there, and what the broker got."""
    return lambda alias: Book(using=alias)
