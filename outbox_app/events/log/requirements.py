"""The requirements that a log's table and server must meet for the log to be read exactly.

Without them events could be lost, or out of order. Every window checks them before it reads from a
state, on Spark, too, and refuses to read; a subscription keeps the reason on its cursor. The system
checks report each violation by its id. Imports no Django: Spark's executors use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ..exceptions import LogSetBack, UnsafeLog
from .window import Run

#: Whether a server of MySQL is read-only. On later MariaDB the variable has further values.
READ_ONLY = "CAST(@@read_only AS CHAR) NOT IN ('OFF', '0')"
_VARIABLES = (
    "auto_increment_increment",
    "group_replication_group_name",
    "group_replication_single_primary_mode",
    "read_only",
    "wsrep_on",
)


@dataclass(frozen=True, slots=True)
class Violation:
    id: str
    text: str
    hint: str


def require_exact(vendor: str, table: str, run: Run) -> None:
    """Raise ``UnsafeLog`` if a log cannot be read exactly."""
    for violation in violations(vendor, table, run):
        raise refusal(violation)


def refusal(violation: Violation) -> UnsafeLog:
    return UnsafeLog(f"{violation.text} {violation.hint} ({violation.id})")


def is_replica(table: str) -> Violation:
    """Return the violation of a MySQL server that is ``READ_ONLY``."""
    return Violation(
        id="outbox.E011",
        text=f"The server of {table} is read-only (read_only = ON), a replica: its rows may be "
        "behind, and dirty reads do not show transactions in flight.",
        hint="Point the alias of the log at the primary.",
    )


def require_given_out(table: str, position: int, used: int) -> None:
    """Raise ``LogSetBack`` if a cursor is past the highest position that was given out."""
    if position > used:
        raise LogSetBack(
            f"The cursor has read {table} up to position {position}, but the last position that "
            f"the database gave out is {used}: it was restored. Run manage.py outbox_rebase."
        )


def violations(vendor: str, table: str, run: Run) -> Iterator[Violation]:
    """Yield the requirements that a log violates. Its table must exist."""
    find = {"mysql": _mysql, "postgresql": _postgresql, "sqlite": _sqlite}
    return find[vendor](table, run)


def _mysql(table: str, run: Run) -> Iterator[Violation]:
    slots = ", ".join(["%s"] * len(_VARIABLES))
    found = run(f"SHOW VARIABLES WHERE variable_name IN ({slots})", _VARIABLES)
    variables = {name.lower(): value for name, value in found}
    on = {name for name, value in variables.items() if value in ("ON", "1")}
    if variables["read_only"] not in ("OFF", "0"):
        yield is_replica(table)
    several = variables.get("group_replication_group_name") and (
        "group_replication_single_primary_mode" not in on
    )
    if several or "wsrep_on" in on or variables["auto_increment_increment"] != "1":
        yield Violation(
            id="outbox.E013",
            text=f"The server of {table} is a cluster with several primaries, or gives out "
            "positions in steps (auto_increment_increment = "
            f"{variables['auto_increment_increment']}): transactions in flight on another server "
            "cannot be seen, so no gap could be closed.",
            hint="Keep the log on a server with a single primary, and auto_increment_increment at "
            "1; or keep it on PostgreSQL.",
        )
    for (engine,) in run(
        "SELECT engine FROM information_schema.tables WHERE table_schema = DATABASE() "
        "AND table_name = %s AND engine <> 'InnoDB'",
        [table],
    ):
        yield Violation(
            id="outbox.E008",
            text=f"Table {table} has engine {engine}, not InnoDB: an event would stay when its "
            "transaction is rolled back.",
            hint=f"ALTER TABLE {table} ENGINE = InnoDB",
        )
    # In referential_constraints a user sees a key only with privileges on both of its tables.
    for name, owner, other in run(
        "SELECT DISTINCT constraint_name, table_name, referenced_table_name "
        "FROM information_schema.key_column_usage WHERE table_schema = DATABASE() "
        "AND referenced_table_name <> '' AND %s IN (table_name, referenced_table_name)",
        [table],
    ):
        yield Violation(
            id="outbox.E014",
            text=f"The foreign key {name} from {owner} to {other} makes writers wait for other "
            "rows after they got a position: the position would be taken for unused.",
            hint=f"ALTER TABLE {owner} DROP FOREIGN KEY {name}, and db_constraint=False.",
        )


def _postgresql(table: str, run: Run) -> Iterator[Violation]:
    name = f'"{table}"'
    [(standby, default)] = run(
        "SELECT pg_is_in_recovery(), "
        "(SELECT pg_get_expr(d.adbin, d.adrelid) FROM pg_attrdef d JOIN pg_attribute a "
        "ON a.attrelid = d.adrelid AND a.attnum = d.adnum "
        "WHERE d.adrelid = log.id AND a.attname = 'txid') "
        f"FROM (SELECT '{name}'::regclass AS id) log",
        [],
    )
    if standby:
        yield Violation(
            id="outbox.E011",
            text=f"The server of {table} is a standby, whose snapshots do not list the running "
            "transactions: events would be lost.",
            hint="Point the alias of the log at the primary.",
        )
    if "pg_current_xact_id" not in (default or ""):
        yield Violation(
            id="outbox.E017",
            text=f"Column txid of {table} has the default {default}, not the current transaction: "
            "rows of writers that leave it out would be lost.",
            hint=f"ALTER TABLE {name} ALTER txid SET DEFAULT (pg_current_xact_id()::text::bigint)",
        )
    for cache, step, cycle in run(
        "SELECT seqcache, seqincrement, seqcycle FROM pg_sequence "
        f"WHERE seqrelid = pg_get_serial_sequence('{name}', 'id')::regclass",
        [],
    ):
        if cache > 1 or step < 1 or cycle:
            yield Violation(
                id="outbox.E018",
                text=f"The sequence of {table}.id gives out positions in blocks or backwards "
                f"(CACHE {cache}, INCREMENT {step}{', CYCLE' if cycle else ''}): events of a "
                "stream would come in the wrong order.",
                hint=f"ALTER SEQUENCE of {table}.id: CACHE 1 INCREMENT 1 NO CYCLE",
            )


def _sqlite(table: str, run: Run) -> Iterator[Violation]:
    for (sql,) in run("SELECT sql FROM sqlite_master WHERE name = %s", [table]):
        if "AUTOINCREMENT" not in sql.upper():
            yield Violation(
                id="outbox.E015",
                text=f"Table {table} has no AUTOINCREMENT: the position of a deleted event is used "
                "again.",
                hint="Give it a BigAutoField as primary key, and migrate.",
            )
