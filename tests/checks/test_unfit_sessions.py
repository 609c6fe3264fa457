"""Sessions with unusable settings: the checks report them, and so do commands when they start."""

from __future__ import annotations

import pytest
from django.core.checks import run_checks
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from django.db.backends.sqlite3.base import DatabaseWrapper
from django.db.utils import ConnectionHandler

from outbox_app.checks.databases import check_databases, check_sqlite, check_sqlite_settings
from outbox_app.database.transactions import own_connection
from outbox_app.events import publish, subscriber
from outbox_app.models import StagedJob
from outbox_app.process import preflight
from tests import tasks
from tests.faults.tools import on

mariadb_only = pytest.mark.mariadb_only
#: A setting, and a word of what is said.
UNFIT = [
    *[
        pytest.param(f"sql_mode = '{mode},STRICT_TRANS_TABLES'", word, marks=mariadb_only)
        for mode, word in (
            ("ORACLE", "sql_mode has ORACLE"),
            ("EMPTY_STRING_IS_NULL", "empty texts"),
        )
    ],
    ("sql_safe_updates = 1", "cannot be deleted"),
    ("sql_select_limit = 100", "cut short"),
    ("completion_type = 1", "completion_type is CHAIN"),
    ("completion_type = 2", "completion_type is RELEASE"),
]
#: Settings under which everything works: nothing is said of them.
FIT = [
    *("NO_BACKSLASH_ESCAPES", "ANSI", "HIGH_NOT_PRECEDENCE", "ONLY_FULL_GROUP_BY"),
    *("PAD_CHAR_TO_FULL_LENGTH", "TRADITIONAL"),
    *[pytest.param(mode, marks=mariadb_only) for mode in ("SIMULTANEOUS_ASSIGNMENT", "MSSQL")],
]


@pytest.fixture
def session(alias):
    """``session(setting)``: new sessions of the alias have this setting."""
    settings = connections.settings[alias]
    before = dict(settings["OPTIONS"])

    def use(setting):
        connections[alias].close()
        settings["OPTIONS"]["init_command"] = f"{before['init_command']}, {setting}"

    yield use
    connections[alias].close()
    settings["OPTIONS"] = before


@pytest.mark.django_db(transaction=True)
@on("mariadb")
class TestMySQL:
    @pytest.mark.parametrize(("setting", "words"), UNFIT)
    def test_it_is_said_and_nothing_starts(self, alias, session, setting, words):
        session(setting)
        self.assert_refused(alias, words)

    @pytest.mark.parametrize("charset", ["latin1", "utf8mb3"])
    def test_a_character_set_that_lacks_characters(self, alias, session, charset):
        """What other sessions had written was read as question marks, and sent so."""
        connections.settings[alias]["OPTIONS"]["charset"] = charset
        session("wait_timeout = 1000")
        self.assert_refused(alias, f"character_set_client is {charset}, not utf8mb4")

    def assert_refused(self, alias, words):
        subscriber("one")(lambda events: None)
        [message] = [m for m in check_databases(databases=[alias]) if m.id == "outbox.E031"]
        assert words in message.msg
        for command in ("drain_outbox", "run_subscriptions"):
            with pytest.raises(CommandError, match=words.split()[0]) as refused:
                call_command(command, "--once", database=alias, skip_checks=True)
            assert refused.value.returncode == 2

    def test_dirty_reads(self, alias, session, make_app):
        """A job would leave before its commit, and one that is rolled back, too."""
        subscriber("one")(lambda events: None)
        note = make_app().task(name="note")(tasks.note)
        connections.settings[alias]["OPTIONS"]["isolation_level"] = "read uncommitted"
        session("wait_timeout = 1000")
        with transaction.atomic(using=alias):
            note.delay("", 1)
            with own_connection(alias, seconds=1):
                [message] = [m for m in check_databases(databases=[alias]) if m.id == "outbox.E031"]
                for command in ("drain_outbox", "run_subscriptions", "run_prepared", "run_outbox"):
                    with pytest.raises(CommandError, match="READ-UNCOMMITTED") as refused:
                        call_command(command, "--once", database=alias, skip_checks=True)
                    assert refused.value.returncode == 2
                connections[alias].close()
            assert StagedJob.objects.using(alias).exists()
            transaction.set_rollback(True, using=alias)
        assert "isolation_level" in message.msg

    def test_a_server_that_is_away_stops_no_start(self, alias, monkeypatch, caplog):
        connections[alias].close()
        with monkeypatch.context() as patched:
            patched.setitem(connections[alias].settings_dict, "HOST", "127.0.0.1")
            patched.setitem(connections[alias].settings_dict, "PORT", "1")
            preflight.require_sessions(alias)
        assert connections[alias].connection is None
        assert not caplog.records

    @pytest.mark.parametrize("mode", FIT)
    def test_what_does_no_harm(self, alias, session, make_app, mode):
        seen = []
        subscriber("one")(seen.extend)
        app = make_app()
        note = app.task(name="note")(tasks.note)
        session(f"sql_mode = '{mode},STRICT_TRANS_TABLES'")
        with transaction.atomic(using=alias):
            for i in range(10):
                note.apply_async(("", i), ordering_key="one" if i % 2 else "")
            publish("s-1", "t", {"quoted": "'\\\""})
        call_command("drain_outbox", "--once", database=alias, skip_checks=True)
        call_command("run_subscriptions", "--once", database=alias, skip_checks=True)
        assert not StagedJob.objects.using(alias).exists()
        assert [event.data for event in seen] == [{"quoted": "'\\\""}]
        assert not [m for m in check_databases(databases=[alias]) if m.id == "outbox.E031"]


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("command", ["drain_outbox", "run_subscriptions"])
def test_autocommit_is_off(alias, monkeypatch, command):
    """manage.py refuses it by a check, which call_command skips: published jobs stayed."""
    subscriber("one")(lambda events: None)
    connections[alias].close()
    monkeypatch.setitem(connections[alias].settings_dict, "AUTOCOMMIT", False)
    with pytest.raises(CommandError, match="AUTOCOMMIT is off") as refused:
        call_command(command, "--once", database=alias, skip_checks=True)
    assert refused.value.returncode == 2
    connections[alias].close()


@pytest.mark.parametrize("alias", ["default"], indirect=True)
class TestSQLite:
    @pytest.fixture
    def plain(self, alias, tmp_path, monkeypatch):
        """``plain(**options)``: the outbox's database is an SQLite file with these options."""
        made = []

        def make(**options):
            settings = {**connections[alias].settings_dict, "NAME": tmp_path / "db.sqlite3"}
            connection = DatabaseWrapper({**settings, "OPTIONS": options}, alias=alias)
            handler = ConnectionHandler({alias: connection.settings_dict})
            handler[alias] = connection
            monkeypatch.setattr(preflight, "connections", handler)
            made.append(connection)
            return connection

        yield make
        for connection in made:
            connection.close()

    def test_as_django_makes_it(self, plain):
        connection = plain()
        [message] = check_sqlite_settings()
        assert message.id == "outbox.W025"
        assert "begin as readers and the journal mode is not WAL" in message.msg
        assert "transaction_mode" in message.hint
        [error] = check_sqlite()
        assert (error.id, error.hint) == ("outbox.E026", None)
        text = "SQLite database 'default' is unfit for several processes: see outbox.W025."
        assert error.msg == text
        assert connection.connection is None  # they did not connect
        found = run_checks(tags=["outbox"], databases=[])
        assert [m.id for m in found if m.id in ("outbox.W025", "outbox.E026")] == ["outbox.W025"]

    @pytest.mark.parametrize("mode", ["IMMEDIATE", "exclusive"])
    def test_as_it_should_be(self, plain, mode):
        plain(transaction_mode=mode, init_command="PRAGMA journal_mode=wal;")
        assert check_sqlite_settings() == check_sqlite() == []

    def test_a_file_that_is_in_wal_mode(self, plain):
        with plain().cursor() as cursor:
            cursor.execute("PRAGMA journal_mode = WAL")
            cursor.execute("CREATE TABLE t (id integer)")
        plain(transaction_mode="IMMEDIATE")
        assert check_sqlite_settings() == []
        plain(transaction_mode=None)
        assert "WAL" not in check_sqlite_settings()[0].msg

    def test_in_memory(self, plain):
        plain().settings_dict["NAME"] = ":memory:"
        assert check_sqlite_settings() == []

    @pytest.mark.django_db(transaction=True)
    @pytest.mark.parametrize("command", ["drain_outbox", "run_subscriptions"])
    def test_the_commands_warn_once(self, alias, plain, command, caplog, capsys):
        subscriber("one")(lambda events: None)
        with plain().cursor() as cursor:  # the commands look whether they are there
            for table in ("stagedjob", "subscription"):
                cursor.execute(f"CREATE TABLE outbox_{table} (id integer)")
        call_command(command, "--once", database=alias, skip_checks=False)
        said = capsys.readouterr().err + caplog.text
        assert said.count("outbox.W025") == said.count("database is locked") == 1
        assert said.count("'transaction_mode': 'IMMEDIATE'") == 1
