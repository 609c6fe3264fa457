"""Writers in progress on a log: sessions and prepared transactions, as permissions allow."""

from __future__ import annotations

import os
import time
from contextlib import contextmanager
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
from django.db import connections

from outbox_app.events.log import registry
from outbox_app.events.models import Event
from outbox_app.events.subscriptions import lag
from outbox_app.monitoring import outbox_status
from outbox_app.monitoring.long_transactions import open_writers
from tests.conftest import VARIABLES
from tests.faults.tools import eventually, on
from tests.servers.mysql import MARIADB

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("new_log")]

INSERT = (
    "INSERT INTO outbox_event (topic, stream, version, type, data, metadata, slice, message_id) "
    "VALUES ('', 'late', 1, 'slow', '{{}}', '{{}}', 1, '{}')"
)


@contextmanager
def writing(alias, *before):
    """A session that has written an event and does not commit."""
    other = connections.create_connection(alias)
    try:
        other.set_autocommit(False)
        with other.cursor() as cursor:
            for statement in before:
                cursor.execute(statement)
            cursor.execute(INSERT.format(uuid4().hex))
        yield other
    finally:
        other.close()


def pid_of(connection):
    with connection.cursor() as cursor:
        sql = (
            "SELECT CONNECTION_ID()" if connection.vendor == "mysql" else "SELECT pg_backend_pid()"
        )
        cursor.execute(sql)
        return str(cursor.fetchone()[0])


def found(alias):
    return open_writers(Event, using=alias)["outbox_event"]


def looked(alias):
    """The same; whoever asks InnoDB more often than every 0.1 s is shown the last answer."""
    if connections[alias].vendor == "mysql":
        time.sleep(0.15)
    return found(alias).transactions


@on("postgres", "mariadb")
def test_a_long_transaction_is_named(alias, published, run, seen_by):
    seen_by("all")
    published("a")
    run("all")
    assert looked(alias) == []
    with writing(alias) as other:
        pid = pid_of(other)
        [holder] = eventually(lambda: looked(alias), "it is seen")
        assert (holder.id, holder.prepared) == (pid, False)
        assert holder.user
        assert holder.seconds >= 0
        assert holder.state in ("idle in transaction", "Sleep")
        assert found(alias).denied == ""
        looked(alias)
        assert f"session {pid}" in str(lag.in_flight(using=alias)["outbox_event"].transactions[0])
        # MySQL does not say on which table: of one that has written nothing to it, too.
        jobs = outbox_status(parts={"jobs", "subscriptions"}).in_flight["outbox_stagedjob"]
        elsewhere = connections[alias].vendor == "mysql"
        assert [each.id for each in jobs.transactions] == [pid] * elsewhere
        # It holds its own events only: nothing that could be read is behind.
        assert lag.lags(using=alias)[0].behind == 0
        other.rollback()
        eventually(lambda: not looked(alias), "it has ended")


def test_logs_elsewhere_are_left_out(alias, monkeypatch):
    monkeypatch.setattr(registry, "model_alias", lambda log: alias if log is Event else "elsewhere")
    assert list(lag.in_flight(using=alias)) == ["outbox_event"]


@on("postgres")
def test_its_statement_is_shown(alias):
    with writing(alias) as other:
        with other.cursor() as cursor:
            cursor.execute("SELECT 'what it did last'")
        [holder] = found(alias).transactions
        assert holder.query == "SELECT 'what it did last'"


@on("postgres")
def test_transactions_that_wrote_elsewhere_are_not_blamed(alias):
    other = connections.create_connection(alias)
    try:
        other.set_autocommit(False)
        with other.cursor() as cursor:
            cursor.execute("SELECT pg_current_xact_id()")
            cursor.execute("SELECT * FROM outbox_event FOR UPDATE")
        assert found(alias).transactions == []
    finally:
        other.close()


@on("postgres")
def test_a_prepared_transaction_is_named(alias):
    name = f"outbox-test-{uuid4().hex}"
    with writing(alias) as other:
        with other.cursor() as cursor:
            cursor.execute(f"PREPARE TRANSACTION '{name}'")
        try:
            [holder] = found(alias).transactions
            assert (holder.id, holder.prepared, holder.state) == (name, True, "prepared")
            assert holder.user
            assert f"prepared transaction {name}" in str(holder)
        finally:
            other.commit()
            other.set_autocommit(True)
            with other.cursor() as cursor:
                cursor.execute(f"ROLLBACK PREPARED '{name}'")
    assert found(alias).transactions == []


@on("postgres")
def test_without_the_privilege_it_is_said(alias):
    """A role that may read the log, and not look at the sessions of others."""
    role = f"outbox_{uuid4().hex[:12]}"
    own = connections[alias]
    with own.cursor() as cursor:
        cursor.execute(f"CREATE ROLE {role}")
        cursor.execute(f"GRANT SELECT ON outbox_event TO {role}")
    try:
        with writing(alias) as other:
            with own.cursor() as cursor:
                cursor.execute(f"SET ROLE {role}")
            try:
                seen = found(alias)
            finally:
                with own.cursor() as cursor:
                    cursor.execute("RESET ROLE")
            [holder] = seen.transactions
            assert holder.id == pid_of(other)
            assert holder.seconds is None
            assert "pg_read_all_stats" in seen.denied
            assert "not permitted" in str(holder)
    finally:
        with own.cursor() as cursor:
            cursor.execute(f"DROP OWNED BY {role}")
            cursor.execute(f"DROP ROLE {role}")


@on("mariadb")
def test_without_the_process_privilege_it_is_said(alias, monkeypatch):
    user = f"outbox_{uuid4().hex[:12]}"
    own = connections[alias]
    database = own.settings_dict["NAME"]
    with own.cursor() as cursor:
        cursor.execute(f"CREATE USER {user}@'%%' IDENTIFIED BY 'secret'")
        cursor.execute(f"GRANT SELECT ON {database}.* TO {user}@'%%'")
    other = connections.create_connection(alias)
    other.settings_dict = {**other.settings_dict, "USER": user, "PASSWORD": "secret"}
    assert urlsplit(os.environ[VARIABLES[MARIADB]]).username != user
    try:
        with other.cursor() as cursor:
            cursor.execute("SELECT COUNT(*) FROM outbox_event")
        monkeypatch.setitem(connections._connections.__dict__, alias, other)
        seen = found(alias)
        assert connections[alias] is other
    finally:
        monkeypatch.undo()
        other.close()
        with own.cursor() as cursor:
            cursor.execute(f"DROP USER {user}@'%%'")
    assert seen.transactions == []
    assert "grant PROCESS" in seen.denied


@on("default")
def test_sqlite_does_not_say(alias):
    assert found(alias) == type(found(alias))([], "")
