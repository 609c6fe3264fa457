"""Options of a server of MySQL or MariaDB: private servers, as they are given at its start."""

from __future__ import annotations

from contextlib import contextmanager
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import OperationalError, connections

from outbox_app.checks.databases import check_databases, check_tables
from outbox_app.entities import store
from outbox_app.events import prune_events
from outbox_app.events.checks import check_log_tables
from outbox_app.events.log.reader import LogReader
from outbox_app.events.models import Event
from outbox_app.events.projections.shadow_table import shadow_table
from outbox_app.events.subscriptions import rebase_outbox
from outbox_app.process.preflight import require_migrated
from tests.entities.models import Account, AccountVersion
from tests.faults.tools import outbox_on
from tests.servers.mysql import MARIADB, MARIADB_SERVER

pytestmark = pytest.mark.django_db(databases=[])
KIND = pytest.mark.parametrize("kind", ["mariadb"])


@pytest.fixture
def outbox(kind, django_db_blocker, settings):
    """``outbox(*options)``: an alias on a new server with these options."""
    if MARIADB not in connections:
        pytest.skip(f"no {MARIADB}")

    @contextmanager
    def start(*options):
        with (
            MARIADB_SERVER(extra_arguments=options) as server,
            outbox_on(server.url, django_db_blocker, settings) as alias,
        ):
            yield alias

    return start


def execute(alias, *statements):
    with connections[alias].cursor() as cursor:
        for sql in statements:
            cursor.execute(sql)
        return cursor.fetchall()


@pytest.fixture
def in_capitals(monkeypatch):
    """``in_capitals()``: tables have such names. What is remembered of them ends with the test."""
    models = (Event, Account, AccountVersion)

    def forget():
        for field in (field for model in models for field in model._meta.concrete_fields):
            vars(field).pop("cached_col", None)
        for each in vars(store).values():
            if hasattr(each, "cache_clear"):
                each.cache_clear()

    def rename():
        forget()
        for model in models:
            monkeypatch.setattr(model._meta, "db_table", model._meta.db_table.title())

    yield rename
    forget()


@KIND
def test_names_of_tables_in_capitals_where_the_server_has_none(outbox, in_capitals):
    """It lists all tables in lower case, and finds them by either name."""
    with outbox("--lower-case-table-names=1") as alias:
        in_capitals()
        assert [*check_tables(databases=[alias])] == []
        assert check_databases(databases=[alias]) == []
        assert [*check_log_tables(databases=[alias])] == []
        require_migrated(alias, Account)
        Account.execute("a", "open", {"owner": "a"}, command_id="1", using=alias)
        out = StringIO()
        call_command("outbox_entities", "verify", "--database", alias, stdout=out, skip_checks=True)
        assert "type=entities.Account entities=1 differences=0" in out.getvalue()
        reader = LogReader(Event, using=alias)
        reader.verify(reader.window.start())
        reader.close()
        assert prune_events(using=alias, log="Outbox_Event", older_than=1) == 0
        lines = []
        assert rebase_outbox(using=alias, write=lines.append) == 0
        assert "unchanged log=Outbox_Event" in " ".join(lines)
        with shadow_table(Event, using=alias) as shadow:
            left = shadow._meta.db_table.lower()
            execute(alias, f"CREATE TABLE {left[:-1]} (id int PRIMARY KEY)")  # a killed rebuild's
            with shadow_table(Event, using=alias):
                tables = connections[alias].introspection.table_names()
                assert len([name for name in tables if "__rebuild_" in name]) == 1
        execute(
            alias,
            "ALTER TABLE account CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci",
            "SELECT 1",
        )
        [message] = check_databases(databases=[alias])
        assert message.id == "outbox.E009"
        assert message.msg.startswith("Table account on")
        assert message.hint.startswith("Run manage.py makemigrations, and migrate --database")


@KIND
@pytest.mark.parametrize("level", ["repeatable read", "read committed"])
def test_a_binary_log_of_statements(outbox, level):
    """The server refuses each write at READ COMMITTED, which some of our transactions set."""
    with outbox("--log-bin", "--binlog-format=ROW") as alias:
        connections[alias].close()
        options = connections.settings[alias]["OPTIONS"]
        options["isolation_level"] = level
        assert check_databases(databases=[alias]) == []
        execute(alias, "SET GLOBAL binlog_format = 'STATEMENT'", "SELECT 1")
        connections[alias].close()
        with pytest.raises(OperationalError, match="1665"):
            Account.execute("a", "open", {"owner": "a"}, command_id="1", using=alias)
        [message] = check_databases(databases=[alias])
        assert message.id == "outbox.E031"
        assert "binlog_format is STATEMENT" in message.msg
        with pytest.raises(CommandError, match="set it to ROW or MIXED"):
            call_command("drain_outbox", "--once", database=alias, skip_checks=True)
        options["init_command"] += ", SESSION binlog_format = 'MIXED'"
        connections[alias].close()
        assert check_databases(databases=[alias]) == []
        Account.execute("a", "open", {"owner": "a"}, command_id="1", using=alias)
