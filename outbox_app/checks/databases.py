"""Databases that hold an outbox: what their configuration would break or slow down.

The checks run for the aliases that ``--database`` names, if the tables exist: ``migrate`` checks
before it creates them. They read catalogues and the first rows of the job table. With ``--deploy``
they try LISTEN on PostgreSQL as a drainer does, which takes ``TEST_SECONDS`` if it hears nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from typing import Any

import django.db
from django.apps import apps
from django.core.checks import CheckMessage, Error, Warning
from django.db import connections, models, router
from django.db.migrations.executor import MigrationExecutor

from ..aliases import chosen_alias, inbox_alias
from ..capability import all_doors, capabilities, is_on
from ..database.clock import has_turning_clock
from ..database.encoding import encoding_of
from ..database.lock_wait import codes_of
from ..database.tables import Tables, as_compared, is_hidden
from ..database.transactions import own_connection
from ..database.watchdog import Watchdog
from ..fields import CharField, JSONField, TextField, exact_collation
from ..jobs.staging.sending import celery_app, load_tasks
from ..models import InboxEntry, StagedJob
from ..process.preflight import SQLITE_OPTIONS, session_faults, sqlite_fault
from ..process.waiting import TEST_SECONDS, StopFlag, has_old_driver, waiter
from ..process.wakeup import JOBS
from .aliases import written_aliases
from .messages import listed

#: How many staged rows are read, the oldest first.
ROWS = 1000
#: The codes of a missing privilege: code that stages may do no more than INSERT.
DENIED = {1142, 1143, "42501"}
#: By vendor, the query that returns whether a server is read-only.
STANDBY = {
    "postgresql": "SELECT pg_is_in_recovery()",
    "mysql": "SELECT CAST(@@read_only AS CHAR) NOT IN ('OFF', '0')",
}


def check_databases(databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    models = {*(m for app in capabilities() for m in app.get_models()), *_of_the_project()}
    found: list[CheckMessage] = []
    for connection, tables in _holding(databases):
        if connection.vendor == "mysql":
            ours = [model for model in models if model._meta.db_table in tables]
            found += [*_check_mysql(connection, ours), *_check_collations(connection, tables)]
        found += [*_check_driver(connection.alias), *_check_encoding(connection.alias)]
        found += _check_primary(connection.alias)
        found += _check_tasks(connection.alias)
    return found


def check_tables(databases: Sequence[str] | None = None, **kwargs: Any) -> Iterator[CheckMessage]:
    """Report tables that are missing, unless ``migrate`` asks, which is about to create them."""
    if sys.argv[1:2] == ["migrate"]:
        return
    for alias in databases or ():
        tables = Tables(connections[alias])
        for app in capabilities():
            wanted = (each for each in app.get_models() if _is_expected(each, alias))
            names = {each._meta.db_table for each in wanted}
            if missing := sorted(n for n in names if n not in tables and not is_hidden(n, alias)):
                yield Warning(
                    f"Database {alias!r} lacks tables of {app.name}: {listed(missing)}. Calls "
                    "that need them fail.",
                    hint=f"Run manage.py migrate {app.label} --database {alias}.",
                    id="outbox.W053",
                )


def _is_expected(model: type[models.Model], alias: str) -> bool:
    homes = {chosen_alias() or router.db_for_write(model)}
    if model is InboxEntry:
        homes = {inbox_alias()}
    return model._meta.managed and alias in homes and is_on(alias, model)


def _holding(databases: Sequence[str] | None) -> Iterator[tuple[Any, Tables]]:
    """Yield the connections whose databases hold an outbox, each with its tables."""
    for alias in databases or ():
        tables = Tables(connections[alias])
        if StagedJob._meta.db_table in tables:
            yield connections[alias], tables


def _asked(alias: str, sql: str) -> Any:
    with connections[alias].cursor() as cursor:
        cursor.execute(sql)
        return cursor.fetchone()[0]


def _check_mysql(connection: Any, models: list[Any]) -> Iterator[CheckMessage]:
    tables = sorted({model._meta.db_table for model in models})
    slots = ", ".join(["%s"] * len(tables))
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT table_name, engine FROM information_schema.tables "
            f"WHERE table_schema = DATABASE() AND table_name IN ({slots}) AND engine <> 'InnoDB'",
            tables,
        )
        engines = cursor.fetchall()
    for table, engine in engines:
        yield Error(
            f"Table {table} on {connection.alias!r} has engine {engine}, not InnoDB: its "
            "rows would stay when their transaction is rolled back.",
            hint=f"ALTER TABLE {table} ENGINE = InnoDB",
            id="outbox.E008",
        )
    for fault in session_faults(connection.alias):
        text = f"Session of {connection.alias!r}: {fault}. No process of the outbox starts."
        hint = "DATABASES[…]['OPTIONS']['init_command'] = \"SET …\", or the server's settings."
        yield Error(text, hint=hint, id="outbox.E031")
    if has_turning_clock(connection.alias):
        yield Warning(
            f"USE_TZ is off, and the clocks of sessions of {connection.alias!r} are set back and "
            "forward: a job that is held until the hour that comes twice may leave an hour late, "
            "and in both nights other times of the outbox are an hour off.",
            hint="Set USE_TZ = True, or the sessions' time zone to UTC by OPTIONS['init_command'] "
            "= \"SET time_zone = '+00:00'\", and convert the times that are stored already.",
            id="outbox.W049",
        )
    modes = set(_asked(connection.alias, "SELECT @@sql_mode").split(","))
    if not {"STRICT_TRANS_TABLES", "STRICT_ALL_TABLES"} & modes:
        yield Error(
            f"sql_mode of {connection.alias!r} is not strict: the server truncates values that do "
            "not fit, without an error.",
            hint="DATABASES[…]['OPTIONS']['init_command'] = \"SET sql_mode='STRICT_TRANS_TABLES'\"",
            id="outbox.E025",
        )


def _check_collations(connection: Any, tables: Tables) -> Iterator[CheckMessage]:
    """Report keys that the server compares otherwise than their fields do."""
    alias, collation = connection.alias, exact_collation(connection)

    def named(model: Any) -> str:
        return as_compared(model._meta.db_table, connection)

    own = {named(model): _keys(model) for model in _of_the_project()}
    expected = {
        (named(model), field.column)
        for model in apps.get_models(include_auto_created=True)
        for field in model._meta.local_concrete_fields
        if model._meta.db_table in tables
        if (
            not isinstance(field, JSONField)
            and field.db_parameters(connection).get("collation") == collation
        )
        or field.column in own.get(named(model), ())
    }
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT table_name, column_name, collation_name FROM information_schema.columns "
            "WHERE table_schema = DATABASE() AND collation_name <> %s",
            [collation],
        )
        wrong = sorted(
            row
            for row in cursor.fetchall()
            if (as_compared(row[0], connection), row[1]) in expected
        )
    is_pending = bool(wrong) and _is_pending(connection)
    for table in dict.fromkeys(table for table, *_ in wrong):
        columns = [f"{name} ({found})" for other, name, found in wrong if other == table]
        text = (
            f"Table {table} on {alias!r} does not compare byte by byte in utf8mb4: "
            f"{listed(columns)}. Keys that differ in case or in trailing spaces are equal there."
        )
        run = f"Run manage.py migrate --database {alias}, and check again."
        if is_pending:
            yield Warning(text, hint=run, id="outbox.W048")
            continue
        convert = f"ALTER TABLE {table} CONVERT TO CHARACTER SET utf8mb4 COLLATE {collation}"
        if as_compared(table, connection) in own and not table.startswith("outbox_"):
            run = f"Run manage.py makemigrations, and migrate --database {alias}"
            convert = f"{run}. If no migration changes the columns: {convert}"
        yield Error(text, hint=convert, id="outbox.E009")


def check_keys(**kwargs: Any) -> Iterator[CheckMessage]:
    """Report the same, without a query, of fields that replace inherited ones."""
    for model in _of_the_project():
        yield from _check_keys(model, router.db_for_write(model))


def _of_the_project() -> Iterator[type[models.Model]]:
    """Yield the project's models that derive from those of capabilities."""
    return (model for doors in all_doors() for model in doors.models())


def _keys(model: Any) -> set[str | None]:
    """Return the columns of texts that a model inherits from ours, or replaces."""
    bases = [each for each in model.__mro__ if each.__module__.startswith("outbox_app.")]
    found = [field for each in bases if hasattr(each, "_meta") for field in each._meta.local_fields]
    return {field.column for field in found if isinstance(field, CharField)}


def _check_keys(model: Any, alias: str) -> Iterator[CheckMessage]:
    keys = _keys(model)
    plain = [
        field.name
        for field in model._meta.concrete_fields
        if isinstance(field, models.CharField | models.TextField) and field.column in keys
        if not (isinstance(field, CharField | TextField) or field.db_collation)
    ]
    if plain and connections[alias].vendor == "mysql":
        yield Error(
            f"{listed(plain)} does not compare byte by byte: on {alias!r} keys that differ in case "
            "or in trailing spaces would be equal.",
            hint="Declare the fields with outbox_app.fields.CharField, and run makemigrations.",
            obj=model,
            id="outbox.E009",
        )


def _is_pending(connection: Any) -> bool:
    """Return whether ``migrate``, which checks before it begins, has something to apply."""
    executor = MigrationExecutor(connection)
    return bool(executor.migration_plan(executor.loader.graph.leaf_nodes()))


def check_sqlite_settings(**kwargs: Any) -> list[CheckMessage]:
    """Warn of a database in which processes lock each other out: a single process works there."""
    faults = filter(None, map(sqlite_fault, sorted(written_aliases())))
    return [Warning(f"{fault}.", hint=SQLITE_OPTIONS, id="outbox.W025") for fault in faults]


def check_sqlite(**kwargs: Any) -> list[CheckMessage]:
    """Report the same as an error, as several processes run in production; W025 has the words."""
    return [
        Error(
            f"SQLite database {alias!r} is unfit for several processes: see outbox.W025.",
            id="outbox.E026",
        )
        for alias in sorted(written_aliases())
        if sqlite_fault(alias)
    ]


def _check_driver(alias: str) -> Iterator[CheckMessage]:
    if has_old_driver(alias):
        yield Warning(
            f"Django connects to {alias!r} by psycopg2, which does not listen: no commit wakes a "
            "process of the outbox. They poll, ten times a second by default.",
            hint="pip install 'psycopg[binary]>=3.2': Django prefers it, and needs no setting.",
            id="outbox.W051",
        )


def _check_encoding(alias: str) -> Iterator[CheckMessage]:
    if name := encoding_of(alias):
        yield Warning(
            f"Database {alias!r} has the encoding {name}, not UTF8: jobs with "
            f"{'other characters than ASCII' if name == 'SQL_ASCII' else 'other characters'} are "
            "refused, with InvalidJob, and so are such texts of other apps.",
            hint="Dump the database, create it anew with ENCODING 'UTF8' TEMPLATE template0, and "
            "load the dump.",
            id="outbox.W050",
        )


def _check_primary(alias: str) -> Iterator[CheckMessage]:
    """Report a standby. The check of logs covers other aliases: reads by time may use a replica."""
    sql = STANDBY.get(connections[alias].vendor)
    if sql and alias in written_aliases() and _asked(alias, sql):
        yield Error(
            f"{alias!r} is the alias of the outbox or of the inbox, and its server is a standby or "
            "read-only: nothing can be staged there, and no drainer can work.",
            hint="Point the alias at the primary, by an address that follows a switch-over.",
            id="outbox.E011",
        )


def _check_tasks(alias: str) -> Iterator[CheckMessage]:
    staged = StagedJob.objects.using(alias).order_by("id").values_list("app", "task")[:ROWS]
    tasks: dict[str, set[str]] = {}
    try:
        for name, task in staged:
            tasks.setdefault(name, set()).add(task)
    except django.db.Error as error:
        if codes_of(error).isdisjoint(DENIED):
            raise
    for name, names in sorted(tasks.items()):
        app = celery_app(name)
        if app is None:
            yield Warning(
                f"Jobs of Celery app {name!r} are staged on {alias!r}; no such app is loaded here.",
                hint="Import its module where the drainer runs: in the project's __init__.py.",
                id="outbox.W010",
            )
            continue
        try:
            load_tasks(app)
        except Exception:  # reported by the check of the apps
            continue
        unknown = sorted(names.difference(app.tasks))
        if unknown:
            yield Warning(
                f"Jobs that are staged on {alias!r} name tasks that Celery app {name!r} does not "
                f"have: {listed(unknown)}. A worker drops such a message.",
                hint="Bring the tasks back under their old names until the jobs are executed, or "
                "discard the jobs. Silence this if only workers of another project have the tasks.",
                id="outbox.W011",
            )


def check_sessions(databases: Sequence[str] | None = None, **kwargs: Any) -> list[CheckMessage]:
    by_vendor = {"postgresql": [_check_commits, _check_listen]}
    return [
        message
        for connection, _ in _holding(databases)
        for check in by_vendor.get(connection.vendor, ())
        for message in check(connection)
    ]


def _check_commits(connection: Any) -> Iterator[CheckMessage]:
    """Report a PostgreSQL that confirms a commit before it is on disk."""
    alias = connection.alias
    if _asked(alias, "SHOW synchronous_commit") == "off":
        yield Warning(
            f"synchronous_commit is off for sessions of {alias!r}: a crash of PostgreSQL loses its "
            "last commits, although the broker may already have received their jobs.",
            hint=f"ALTER ROLE {connection.settings_dict['USER']} SET synchronous_commit = "
            "on (or of the database, or in postgresql.conf).",
            id="outbox.W023",
        )


def _check_listen(connection: Any) -> Iterator[CheckMessage]:
    """Report a LISTEN that hears no NOTIFY."""
    alias = connection.alias
    watchdog = Watchdog(using=alias, limit=TEST_SECONDS)
    listening = waiter(StopFlag(), using=alias, watchdog=watchdog, channel=JOBS)
    with own_connection(alias, seconds=TEST_SECONDS):  # not of Django's pool
        fault = listening.fault()
    if not fault:
        return
    yield Warning(
        f"LISTEN through {alias!r} does not work: {fault}. Drainers are not woken and poll, once a "
        "second by default.",
        hint="Give the drainers an alias that bypasses the pooler, and name it in --database. "
        "Silence this if the drainers may poll.",
        id="outbox.W022",
    )
