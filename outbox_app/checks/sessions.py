"""What a session of PostgreSQL is like: commits that wait for no disk, LISTEN that hears nothing.

Asked for by ``check --deploy --database ALIAS``, for aliases that hold an outbox. LISTEN is tried
as a drainer tries it, on two sessions of the check's own; one that hears nothing costs
``HEAR_SECONDS``.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any
from uuid import uuid4

import django.db
from django.core.checks import CheckMessage, Warning
from django.db import connections

from ..models import StagedJob
from ..process.wakeup import JOBS

#: Seconds in which a NOTIFY must be heard. Longer than a drainer's own test, which is repeated.
HEAR_SECONDS = 5.0


def check_sessions(databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    found: list[CheckMessage] = []
    for alias in databases or ():
        connection = connections[alias]
        if connection.vendor != "postgresql":
            continue
        if StagedJob._meta.db_table in connection.introspection.table_names():
            found += [*_check_commits(alias), *_check_listen(alias)]
    return found


def _check_commits(alias: str) -> Iterator[CheckMessage]:
    with connections[alias].cursor() as cursor:
        cursor.execute("SHOW synchronous_commit")
        (value,) = cursor.fetchone()
    if value == "off":
        yield Warning(
            f"synchronous_commit is off for sessions of {alias!r}: a crash of PostgreSQL loses its "
            "last commits, and the broker may have had their jobs by then.",
            hint=f"ALTER ROLE {connections[alias].settings_dict['USER']} SET synchronous_commit = "
            "on (or of the database, or in postgresql.conf).",
            id="outbox.W023",
        )


def _check_listen(alias: str) -> Iterator[CheckMessage]:
    from django.db.backends.postgresql.psycopg_any import is_psycopg3

    if not is_psycopg3:
        return  # drainers do not listen with psycopg2
    try:
        heard = _hears(alias)
    except (django.db.Error, OSError) as error:
        text = f"could not be tried: {type(error).__name__}: {str(error).strip()}"
    else:
        text = "does not work: a NOTIFY was not heard"
        if heard:
            return
    yield Warning(
        f"LISTEN through {alias!r} {text}. Drainers are not woken and poll, once a second by "
        "default. Is there a pooler in transaction mode?",
        hint="Let drainers use an alias that goes around the pooler, and name that in --database. "
        "Silence this if they may poll.",
        id="outbox.W022",
    )


def _hears(alias: str) -> bool:
    token = uuid4().hex  # drainers that hear it take it for a test of another drainer
    with (
        closing(connections.create_connection(alias)) as listener,
        closing(connections.create_connection(alias)) as notifier,
    ):
        with listener.cursor() as cursor:
            cursor.execute(f"LISTEN {JOBS}")
        # A pooler may well show a session its own notices, so another one sends it.
        with notifier.cursor() as cursor:
            cursor.execute("SELECT pg_notify(%s, %s)", [JOBS, token])
        until = time.monotonic() + HEAR_SECONDS
        while (left := until - time.monotonic()) > 0:
            for notice in listener.connection.notifies(timeout=left, stop_after=1):
                if notice.payload == token:
                    return True
    return False
