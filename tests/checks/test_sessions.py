"""Checks of a PostgreSQL session: direct, through a pooler, and on a standby."""

from __future__ import annotations

from contextlib import contextmanager
from functools import partial

import pytest
from django.core.management import call_command
from django.db import connections

from outbox_app.checks import databases
from outbox_app.checks.databases import check_databases, check_sessions
from outbox_app.events.checks import check_log_tables
from outbox_app.process import waiting
from tests.faults.test_pgbouncer import pooler
from tests.faults.tools import alias_for, on
from tests.patience import patience
from tests.servers import PostgreSQL
from tests.servers.mysql import MARIADB, MARIADB_SERVER
from tests.servers.transfer import Standby

__all__ = ["pooler"]


def ids(messages):
    return [message.id for message in messages]


@contextmanager
def at(alias, **settings):
    """Connect the alias otherwise for the time of the block."""
    kept = connections.settings[alias]
    before = dict(kept)
    connections[alias].close()
    kept.update(settings)
    try:
        yield
    finally:
        connections[alias].close()
        kept.clear()
        kept.update(before)


def test_a_session_that_is_well(alias):
    assert check_sessions(databases=[alias]) == []
    assert check_sessions(databases=None) == []


@on("postgres")
def test_tables_need_not_exist(alias, monkeypatch):
    introspection = connections[alias].introspection
    monkeypatch.setattr(introspection, "table_names", lambda cursor=None: ["auth_user"])
    monkeypatch.setattr(databases, "_check_listen", lambda alias: pytest.fail("asked"))
    assert check_sessions(databases=[alias]) == []


@on("postgres")
@pytest.mark.parametrize(("value", "fits"), [("off", False), ("on", True), ("local", True)])
def test_synchronous_commit(alias, value, fits):
    with connections[alias].cursor() as cursor:
        cursor.execute(f"SET synchronous_commit = {value}")
    messages = check_sessions(databases=[alias])
    assert ids(messages) == ([] if fits else ["outbox.W023"])
    if not fits:
        user = connections[alias].settings_dict["USER"]
        assert f"ALTER ROLE {user} SET synchronous_commit = on" in messages[0].hint


@on("postgres")
@pytest.mark.django_db(transaction=True)
class TestPooler:
    def test_transaction_mode(self, alias, pooler, monkeypatch):
        monkeypatch.setattr(waiting, "TEST_SECONDS", 0.3)
        with at(alias, HOST="127.0.0.1", PORT=str(pooler), DISABLE_SERVER_SIDE_CURSORS=True):
            [message] = check_sessions(databases=[alias])
        assert message.id == "outbox.W022"
        assert "a NOTIFY was not heard" in message.msg
        assert "bypasses the pooler" in message.hint

    def test_connections_that_are_refused(self, alias, monkeypatch):
        """The session of the check is there; further ones are not to be had."""
        kept = connections[alias]
        kept.ensure_connection()
        create = connections.create_connection

        def elsewhere(name):
            made = create(name)
            made.settings_dict = {**made.settings_dict, "PORT": "1"}
            return made

        monkeypatch.setattr(connections, "create_connection", elsewhere)
        [message] = check_sessions(databases=[alias])
        assert message.id == "outbox.W022"
        assert "does not work: connection failed" in message.msg

    def test_the_notify_of_the_check_wakes_no_drainer(self, alias):
        with connections.create_connection(alias).cursor() as cursor:
            cursor.execute("LISTEN outbox_jobs")
            assert check_sessions(databases=[alias]) == []
            heard = cursor.connection.notifies(timeout=patience(20), stop_after=1)
            assert [len(notice.payload) for notice in heard] == [32]
            cursor.connection.close()


@pytest.mark.parametrize("role", ["DATABASE", "INBOX_DATABASE"])
def test_a_standby(standby, settings, role):
    """Of the outbox, of the inbox; a log is told of where it is neither's alias."""
    assert ids(check_databases(databases=[standby])) == []
    assert set(ids(check_log_tables(databases=[standby]))) == {"outbox.E011"}
    settings.OUTBOX = {role: standby}
    [message] = check_databases(databases=[standby])
    assert message.id == "outbox.E011"
    assert f"{standby!r} is the alias of the outbox or of the inbox" in message.msg
    assert ids(check_log_tables(databases=[standby])) == []


@pytest.fixture(scope="module")
def servers(django_db_blocker):
    """The address of a standby of a migrated PostgreSQL."""
    if "postgres" not in connections:
        pytest.skip("no postgres")
    with PostgreSQL() as primary, django_db_blocker.unblock():
        with alias_for(primary.url) as alias:
            call_command("migrate", database=alias, verbosity=0, skip_checks=True)
        with Standby(primary) as standby:
            yield standby.url


@pytest.fixture
def standby(servers, django_db_blocker):
    with django_db_blocker.unblock(), alias_for(servers) as alias:
        yield alias


@pytest.mark.parametrize("kind", ["mariadb"])
def test_a_read_only_mariadb(kind, django_db_blocker, settings):
    if MARIADB not in connections:
        pytest.skip("no mariadb")
    with MARIADB_SERVER() as server, django_db_blocker.unblock(), alias_for(server.url) as alias:
        call_command("migrate", database=alias, verbosity=0, skip_checks=True)
        settings.OUTBOX = {"DATABASE": alias}
        assert check_databases(databases=[alias]) == []
        with connections[alias].cursor() as cursor:
            cursor.execute("SET GLOBAL read_only = ON")
        assert ids(check_databases(databases=[alias])) == ["outbox.E011"]


def test_the_driver_that_does_not_listen(alias, monkeypatch, caplog):
    """psycopg2 in place of psycopg 3: the check says so, and each process at its start."""
    start = partial(waiting.waiter, waiting.StopFlag(), using=alias, channel="outbox_jobs")
    assert "outbox.W051" not in ids(check_databases(databases=[alias]))
    start(watchdog=None)
    assert "psycopg 3 is not installed" not in caplog.text
    monkeypatch.setattr("django.db.backends.postgresql.psycopg_any.is_psycopg3", False)
    found = [m for m in check_databases(databases=[alias]) if m.id == "outbox.W051"]
    start(watchdog=None, channel="")
    assert "psycopg 3 is not installed" not in caplog.text  # it was not asked to listen
    assert type(start(watchdog=None)) is waiting.PollWaiter
    if alias == "postgres":
        assert f"Django connects to {alias!r} by psycopg2" in found[0].msg
        text = f"psycopg 3 is not installed, polling instead of LISTEN database={alias}"
        assert text in caplog.text
        assert waiting.poll_interval(None, using=alias) == waiting.POLL_INTERVAL
    else:
        assert found == []
        assert "psycopg 3 is not installed" not in caplog.text
