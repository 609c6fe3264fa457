"""What a window cannot see for itself: tables and servers on which a log is not read exactly.

Looked at by the system checks, which name each fault with an id, and whenever a subscription
starts: what could lose events is refused there, and stays on the cursor's row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from django.db import connections

from ..exceptions import UnsafeLog
from ..models import EventLog

_VARIABLES = (
    "auto_increment_increment",
    "group_replication_group_name",
    "group_replication_single_primary_mode",
    "read_only",
    "wsrep_on",
)


@dataclass(frozen=True, slots=True)
class Fault:
    """Something that is wrong with a log on one database."""

    id: str
    text: str
    hint: str
    #: Events could be lost, or come in the wrong order: nothing is read until it is corrected.
    refused: bool = True


def require_sound(log: type[EventLog], *, using: str) -> None:
    """See that a log can be read exactly on an alias.

    Raises:
        UnsafeLog: It cannot; the message says what to do.
    """
    for fault in faults(log, using=using):
        if fault.refused:
            raise UnsafeLog(f"{fault.text} {fault.hint} ({fault.id})")


def faults(log: type[EventLog], *, using: str) -> Iterator[Fault]:
    """Yield what is wrong with a log, whose table exists, on an alias."""
    find = {"mysql": _mysql, "postgresql": _postgresql, "sqlite": _sqlite}
    return find[connections[using].vendor](log._meta.db_table, using)


def _mysql(table: str, using: str) -> Iterator[Fault]:
    slots = ", ".join(["%s"] * len(_VARIABLES))
    found = _run(using, f"SHOW VARIABLES WHERE variable_name IN ({slots})", _VARIABLES)
    variables = {name.lower(): value for name, value in found}
    on = {name for name, value in variables.items() if value in ("ON", "1")}
    if "read_only" in on:
        yield Fault(
            id="outbox.E011",
            text=f"The server of {using!r} is read-only, a replica: its rows may be behind, and "
            "dirty reads show nothing of what is in flight.",
            hint="Let the alias of the log be the primary.",
        )
    several = variables.get("group_replication_group_name") and (
        "group_replication_single_primary_mode" not in on
    )
    if several or "wsrep_on" in on or variables["auto_increment_increment"] != "1":
        yield Fault(
            id="outbox.E013",
            text=f"{using!r} is a cluster with several primaries, or gives out positions in steps "
            f"(auto_increment_increment = {variables['auto_increment_increment']}): what another "
            "server has in flight cannot be seen, so no gap could be closed.",
            hint="Keep the log on a server with a single primary, and auto_increment_increment at "
            "1; or keep it on PostgreSQL.",
        )
    for (engine,) in _run(
        using,
        "SELECT engine FROM information_schema.tables WHERE table_schema = DATABASE() "
        "AND table_name = %s AND engine <> 'InnoDB'",
        [table],
    ):
        yield Fault(
            id="outbox.E008",
            text=f"Table {table} on {using!r} has engine {engine}, not InnoDB: an event would stay "
            "when its transaction is rolled back.",
            hint=f"ALTER TABLE {table} ENGINE = InnoDB",
        )
    for name, owner, other in _run(
        using,
        "SELECT constraint_name, table_name, referenced_table_name "
        "FROM information_schema.referential_constraints "
        "WHERE constraint_schema = DATABASE() AND %s IN (table_name, referenced_table_name)",
        [table],
    ):
        yield Fault(
            id="outbox.E014",
            text=f"The foreign key {name} from {owner} to {other} on {using!r} makes writers wait "
            "for other rows after their position was given out: it would be taken for unused.",
            hint=f"ALTER TABLE {owner} DROP FOREIGN KEY {name}, and db_constraint=False.",
        )


def _postgresql(table: str, using: str) -> Iterator[Fault]:
    name = connections[using].ops.quote_name(table)
    [(standby, default, indexed)] = _run(
        using,
        "SELECT pg_is_in_recovery(), "
        "(SELECT pg_get_expr(d.adbin, d.adrelid) FROM pg_attrdef d JOIN pg_attribute a "
        "ON a.attrelid = d.adrelid AND a.attnum = d.adnum "
        "WHERE d.adrelid = log.id AND a.attname = 'txid'), "
        "EXISTS (SELECT FROM pg_index i WHERE i.indrelid = log.id AND i.indisvalid "
        "AND i.indpred IS NULL AND pg_get_indexdef(i.indexrelid, 1, true) = 'txid' "
        "AND pg_get_indexdef(i.indexrelid, 2, true) = 'id') "
        "FROM (SELECT %s::regclass AS id) log",
        [name],
    )
    if standby:
        yield Fault(
            id="outbox.E011",
            text=f"The server of {using!r} is a standby, whose snapshots do not list the running "
            "transactions: events would be lost.",
            hint="Let the alias of the log be the primary.",
        )
    if "pg_current_xact_id" not in (default or ""):
        yield Fault(
            id="outbox.E017",
            text=f"Column txid of {table} on {using!r} has the default {default}, not the current "
            "transaction: rows of writers that leave it out would be lost.",
            hint=f"ALTER TABLE {name} ALTER txid SET DEFAULT (pg_current_xact_id()::text::bigint)",
        )
    if not indexed:
        yield Fault(
            id="outbox.E016",
            text=f"Table {table} on {using!r} has no index on (txid, id): each look at the log "
            "reads all of it.",
            hint=f"CREATE INDEX CONCURRENTLY ON {name} (txid, id)",
            refused=False,
        )
    for cache, step, cycle in _run(
        using,
        "SELECT seqcache, seqincrement, seqcycle FROM pg_sequence "
        "WHERE seqrelid = pg_get_serial_sequence(%s, 'id')::regclass",
        [name],
    ):
        if cache > 1 or step < 1 or cycle:
            yield Fault(
                id="outbox.E018",
                text=f"The sequence of {table}.id on {using!r} does not go up from one event to "
                f"the next (CACHE {cache}, INCREMENT {step}{', CYCLE' if cycle else ''}): events "
                "of a stream would come in the wrong order.",
                hint=f"ALTER SEQUENCE of {table}.id: CACHE 1 INCREMENT 1 NO CYCLE",
            )


def _sqlite(table: str, using: str) -> Iterator[Fault]:
    for (sql,) in _run(using, "SELECT sql FROM sqlite_master WHERE name = %s", [table]):
        if "AUTOINCREMENT" not in sql.upper():
            yield Fault(
                id="outbox.E015",
                text=f"Table {table} on {using!r} has no AUTOINCREMENT: the position of a deleted "
                "event is used again.",
                hint="Give it a BigAutoField as primary key, and migrate.",
            )


def _run(using: str, sql: str, params: Sequence[Any]) -> list[tuple[Any, ...]]:
    with connections[using].cursor() as cursor:
        cursor.execute(sql, params)
        return list(cursor.fetchall())
