"""Checks, before any work, that a database is fit for it. The errors say what to do.

The alias and the tables must exist, and the session must have no setting that makes statements of
the outbox fail, wait, or do less than they should: errors of the server, if there are any, name a
statement and not the setting. On MySQL and MariaDB such a session is refused. On SQLite a single
process works, so a system check warns. An unavailable database is not refused: drainers wait for
it, and other commands fail by themselves.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Any

import django.db
from django.db import connections
from django.db.models import Model

from ..database.tables import Tables, is_hidden
from ..exceptions import InvalidArgument, NotMigrated, UnfitSession
from ..models import StagedJob

#: The options that several processes on one SQLite file need.
SQLITE_OPTIONS = (
    "DATABASES[…]['OPTIONS'] = {'timeout': 30, 'transaction_mode': 'IMMEDIATE', "
    "'init_command': 'PRAGMA journal_mode = WAL'}"
)
#: Variables of MySQL: the value that each must have, and the effect of other values.
VARIABLES = {
    "sql_safe_updates": (0, "published jobs cannot be deleted"),
    "sql_select_limit": (2**64 - 1, "reads are cut short without an error"),
    "completion_type": ("NO_CHAIN", "a commit begins another transaction, or disconnects"),
    "character_set_client": (
        "utf8mb4",
        "characters that it lacks are read as '?', and to stage one breaks the transaction; set "
        "OPTIONS['charset'] to 'utf8mb4'",
    ),
}
#: SQL modes that are refused, and their effects.
MODES = {
    "ORACLE": "MariaDB uses another SQL dialect, in which batches cannot be read",
    "EMPTY_STRING_IS_NULL": "empty texts cannot be stored",
}


def usable_aliases() -> list[str]:
    """Return the aliases of DATABASES without an empty ``default``, which Django allows."""
    return [a for a, each in connections.settings.items() if not each["ENGINE"].endswith(".dummy")]


def require_alias(using: str) -> None:
    if using not in (known := usable_aliases()):
        raise InvalidArgument(f"Database {using!r}: no such alias. Known: {', '.join(known)}.")


def require_migrated(using: str, model: type[Model] = StagedJob) -> None:
    require_alias(using)
    connection, table = connections[using], model._meta.db_table
    try:
        if table in Tables(connection) or is_hidden(table, using):
            return  # if it is hidden, statements that need it will say so
    except django.db.Error:  # unavailable
        connection.close()
        return
    hidden = ", or let its user see the schema: GRANT USAGE, and search_path"
    raise NotMigrated(
        f"Database {using!r} has no table {table}. Run: manage.py migrate {model._meta.app_label} "
        f"--database {using}{hidden * (connection.vendor == 'postgresql')}"
    )


def session_faults(using: str) -> list[str]:
    """Return the faults of a session of an alias: most are of MySQL and MariaDB."""
    if not connections[using].settings_dict["AUTOCOMMIT"]:
        return ["AUTOCOMMIT is off, so nothing that is written would be committed"]
    if connections[using].vendor != "mysql":
        return []
    with connections[using].cursor() as cursor:
        cursor.execute(f"SELECT @@sql_mode, @@{', @@'.join(VARIABLES)}")
        modes, *values = cursor.fetchone()
        levels = "'transaction_isolation', 'tx_isolation'"  # MySQL, MariaDB
        names = f"({levels}, 'log_bin', 'sql_log_bin', 'binlog_format')"
        cursor.execute(f"SHOW VARIABLES WHERE variable_name IN {names}")
        found = {value for _, value in cursor.fetchall()}
    wrong = [
        f"{name} is {value}, not {wanted}: {effect}"
        for value, (name, (wanted, effect)) in zip(values, VARIABLES.items(), strict=True)
        if value != wanted
    ]
    wrong += [f"sql_mode has {m}: {why}" for m, why in MODES.items() if m in modes.split(",")]
    if {"STATEMENT", "ON"} <= found and "OFF" not in found:  # written to a binary log
        wrong.append(
            "binlog_format is STATEMENT: entities, subscriptions and outbox_prune write at READ "
            "COMMITTED, which the server then refuses (error 1665); set it to ROW or MIXED"
        )
    if "READ-UNCOMMITTED" in found:
        wrong.append(
            "the isolation level is READ-UNCOMMITTED: jobs and events are sent before their "
            "commit, or in spite of a rollback; set OPTIONS['isolation_level'] to 'read committed'"
        )
    return wrong


def sqlite_fault(using: str) -> str:
    """Return, without connecting, why processes lock each other out; empty if they do not."""
    connection: Any = connections[using]
    if connection.vendor != "sqlite" or connection.is_in_memory_db():
        return ""
    settings = connection.settings_dict
    options, wrong = settings["OPTIONS"], []
    if str(options.get("transaction_mode")).upper() not in ("IMMEDIATE", "EXCLUSIVE"):
        wrong.append("transactions begin as readers")
    if "wal" not in str(options.get("init_command")).lower() and not _is_wal(settings["NAME"]):
        wrong.append("the journal mode is not WAL")
    if not wrong:
        return ""
    return (
        f"SQLite database {using!r}: {' and '.join(wrong)}, so that calls fail with 'database is "
        "locked' as soon as two processes write, such as a web server and a drainer"
    )


def require_sessions(using: str) -> None:
    """Refuse a session in which work is impossible."""
    try:
        wrong = session_faults(using)
    except django.db.Error:
        connections[using].close()
        return
    if wrong:
        raise UnfitSession(
            f"Sessions of {using!r} cannot be used: {'; '.join(wrong)}. Correct this in DATABASES, "
            "variables of MySQL by OPTIONS['init_command'] = \"SET …\"."
        )


def _is_wal(name: Any) -> bool:
    with suppress(OSError), open(name, "rb") as file:
        return file.read(19)[18:] == b"\x02"  # the write version of the file format is WAL's
    return False
