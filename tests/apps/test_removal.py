"""``migrate LABEL zero`` refuses while tables have rows that exist nowhere else."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date
from io import StringIO
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
from django.apps import apps
from django.core.management import CommandError, call_command
from django.db import connections
from django.db.migrations.loader import MigrationLoader
from django.utils import timezone

from outbox_app.database import transactions
from outbox_app.models.removal import KeepRows
from tests.apps.processes import manage, run

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(autouse=True)
def migrations_end() -> Iterator[None]:
    """A ``migrate`` that refuses has begun, and does not end: its process would."""
    yield
    for alias in connections:
        transactions._end(using=alias)


def prepared(**columns: Any) -> dict[str, Any]:
    return {"sender": "bank", "event_id": uuid4(), "decide_by": timezone.now(), **columns}


def result(status: str) -> dict[str, Any]:
    now, name = timezone.now(), str(uuid4())
    return {"task_id": name, "status": status, "enqueued_at": now, "kept_from": now}


DEAD = {"shard": 1, "task": "t", "body": b"", "envelope": "", "staged_id": 1}
#: By label: rows that are there, rows that do not count, and what is said.
HELD: dict[str, tuple[list[tuple[str, dict[str, Any]]], list[tuple[str, dict[str, Any]]], str]] = {
    "outbox_app": (
        [("DeadJob", DEAD)],
        [("InboxEntry", {"job_id": "1", "task": "t"})],
        "1 dead job, found nowhere else. Let manage.py drain_outbox --once send",
    ),
    "outbox_events": (
        [
            *[("Event", {"stream": "a", "version": n, "type": "t", "slice": 1}) for n in (1, 2)],
            ("StreamHead", {"log": "outbox_event", "stream": "a", "version": 2}),
        ],
        [],
        "2 events and 1 stream, found nowhere else. Dump or archive the events",
    ),
    "outbox_prepared": (
        [
            ("PreparedEvent", prepared()),
            ("PreparedEvent", prepared(state="undecided")),
            ("Fence", {"event_id": uuid4(), "outcome": "committed"}),
        ],
        [
            ("PreparedEvent", prepared(state="confirmed")),
            ("Fence", {"event_id": uuid4(), "outcome": "rolled_back"}),
        ],
        "2 prepared events and 1 fence, found nowhere else. Let manage.py run_prepared ask",
    ),
    "outbox_entities": (
        [
            (
                "PrunedCommand",
                {"log": 1, "key": uuid4(), "version": 1, "executed_on": date(2026, 1, 1)},
            )
        ],
        [],
        "1 pruned command, found nowhere else. Without its row",
    ),
    "outbox_django_tasks": (
        [("TaskResult", result("READY"))],
        [("TaskResult", result("SUCCESSFUL"))],
        "1 task result, found nowhere else. Let workers run",
    ),
}


def make(label: str, rows: list[tuple[str, dict[str, Any]]], alias: str) -> None:
    for name, columns in rows:
        apps.get_model(label, name)._base_manager.using(alias).create(**columns)


def applied(alias: str) -> set[str]:
    return {label for label, _ in MigrationLoader(connections[alias]).applied_migrations}


def unapply(label: str, alias: str) -> None:
    """Ask the operation of the label's migration, as its way back does first."""
    loader = MigrationLoader(connections[alias])
    operation = loader.graph.nodes[label, "0001_initial"].operations[-1]
    assert isinstance(operation, KeepRows)
    with connections[alias].schema_editor() as editor:
        state = loader.project_state((label, "0001_initial"))
        operation.database_backwards(label, editor, state, state)


@pytest.mark.parametrize("label", HELD)
def test_it_refuses_before_anything_changes(label: str, alias: str) -> None:
    rows, others, said = HELD[label]
    make(label, [*rows, *others], alias)
    with pytest.raises(CommandError) as refused:
        call_command("migrate", label, "zero", database=alias, verbosity=0)
    table = apps.get_model(label, rows[0][0])._meta.db_table
    assert f"The tables of {label} on {alias!r} stay as they are: they hold {said}" in str(
        refused.value
    )
    assert f"DELETE FROM {table};" in str(refused.value)
    assert label in applied(alias)
    for name, _ in rows:
        assert apps.get_model(label, name)._base_manager.using(alias).exists()


@pytest.mark.parametrize("label", HELD)
def test_other_rows_and_missing_tables_do_not_count(label: str, alias: str) -> None:
    rows, others, _ = HELD[label]
    make(label, others, alias)
    unapply(label, alias)
    make(label, rows, alias)
    connection = connections[alias]
    tables = [apps.get_model(label, name)._meta.db_table for name in dict(rows)]
    quoted = connection.ops.quote_name
    with connection.cursor() as cursor:
        for table in tables:
            cursor.execute(f"ALTER TABLE {quoted(table)} RENAME TO {quoted(table + '_away')}")
        try:
            unapply(label, alias)
        finally:
            for table in tables:
                cursor.execute(f"ALTER TABLE {quoted(table + '_away')} RENAME TO {quoted(table)}")
    with pytest.raises(CommandError):
        unapply(label, alias)


def test_neither_fake_nor_sqlmigrate_asks(alias: str) -> None:
    make("outbox_app", HELD["outbox_app"][0], alias)
    out = StringIO()
    options = {"database": alias, "stdout": out}
    call_command("sqlmigrate", "outbox_app", "0001", backwards=True, **options)
    assert "DROP TABLE" in out.getvalue()
    call_command("migrate", "outbox_app", "zero", fake=True, verbosity=0, **options)
    try:
        assert "outbox_app" not in applied(alias)
    finally:
        call_command("migrate", "outbox_app", fake=True, verbosity=0, **options)


@pytest.mark.system
def test_at_the_command_line(tmp_path: Path) -> None:
    """One line, without a traceback; once the jobs have left, the tables go, and come again."""

    def migrate(*arguments: str) -> Any:
        return manage("migrate", "-v0", *arguments, apps="core", folder=tmp_path)

    def do(what: str) -> None:
        code = f"import django; django.setup()\nfrom tests.apps.shop import lives\n{what}"
        done = run("-c", code, apps="core", folder=tmp_path)
        assert done.returncode == 0, done.stderr

    names = "lives.connection.introspection.table_names()"
    tables = f"[name for name in {names} if name.startswith('outbox')]"
    assert migrate().returncode == 0
    do("from outbox_app import stage\nwith lives.transaction.atomic(): stage('shop.note', ['a'])")
    refused = migrate("outbox_app", "zero")
    assert refused.returncode == 1
    assert refused.stderr == (
        "CommandError: The tables of outbox_app on 'default' stay as they are: they hold 1 staged "
        "job, found nowhere else. Let manage.py drain_outbox --once send staged jobs; requeue "
        "or discard dead jobs by manage.py outbox_dead. To lose the rows, delete them (DELETE FROM "
        "outbox_stagedjob;), and repeat the command.\n"
    )
    do("lives.said('drain_outbox', '--once')")
    assert migrate("outbox_app", "zero").returncode == 0
    do(f"assert not {tables}")
    assert migrate().returncode == 0
    do(f"assert {tables}")
