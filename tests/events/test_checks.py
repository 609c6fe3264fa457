# ruff: noqa: DJ008
"""Logs that cannot be read exactly: a check reports them, and subscriptions refuse to start."""

from __future__ import annotations

from contextlib import contextmanager

import pytest
from django.core import checks
from django.db import connections, models
from django.test.utils import isolate_apps

from outbox_app.checks.databases import check_databases
from outbox_app.events import subscriber
from outbox_app.events.checks import check_log_tables, check_logs, check_sinks
from outbox_app.events.log.reader import LogReader
from outbox_app.events.models import Cursor, Event, EventLog
from outbox_app.events.subscriptions.runner import Runner
from outbox_app.events.subscriptions.subscriber import subscriber_named
from outbox_app.fields import exact_collation
from tests.faults.tools import alias_for, on
from tests.servers import PostgreSQL
from tests.servers.mysql import MARIADB, MARIADB_SERVER
from tests.servers.transfer import Standby


def ids(messages):
    return [message.id for message in messages]


def test_a_sink_of_no_log(settings):
    settings.OUTBOX = {"SINK": {"nowhere": ("there", 1), "outbox_event": ("there", 1)}}
    [message] = check_sinks()
    assert message.id == "outbox.E003"
    assert message.msg == "OUTBOX['SINK'] names 'nowhere', which is not the table of a log."
    assert "outbox_event" in message.hint


class TestModels:
    @pytest.fixture(autouse=True)
    def apps(self, monkeypatch):
        """Only the models of the package and of the test are registered."""
        with isolate_apps("tests") as apps:
            found = lambda **options: [Event, *apps.get_models(**options)]  # noqa: E731
            monkeypatch.setattr("outbox_app.events.checks.apps.get_models", found)
            monkeypatch.setattr("outbox_app.events.log.registry.apps.get_models", found)
            yield

    def test_a_log_as_it_should_be(self):
        class Good(EventLog):
            note = models.TextField(null=True)  # noqa: DJ001
            level = models.IntegerField(default=0)
            size = models.GeneratedField(
                expression=models.F("level") + 1,
                output_field=models.IntegerField(),
                db_persist=True,
            )

            class Meta(EventLog.Meta):
                indexes = [*EventLog.Meta.indexes, models.Index(fields=["note"], name="good_note")]

        class Proxy(Good):
            class Meta:
                proxy = True

        assert check_logs() == []

    def test_a_meta_of_its_own_loses_index_and_constraint(self):
        class Bad(EventLog):
            class Meta:
                db_table = "bad"

        [message] = check_logs()
        assert (message.id, message.obj) == ("outbox.E020", Bad)
        assert "the index on (txid, id) and the unique constraint on (stream, ver" in message.msg

    def test_a_partial_constraint_is_none(self):
        class Bad(EventLog):
            class Meta(EventLog.Meta):
                constraints = [
                    models.UniqueConstraint(
                        fields=["stream", "version"],
                        condition=models.Q(topic=""),
                        name="only_some",
                    )
                ]

        [message] = check_logs()
        assert message.id == "outbox.E020"
        assert "index" not in message.msg

    def test_two_tables(self):
        class Sub(Event):
            pass

        assert ids(check_logs()) == ["outbox.E019"]

    @pytest.mark.parametrize(
        "field",
        [
            models.IntegerField(),
            models.CharField(max_length=10),
            models.IntegerField(blank=True),  # of forms only: the database takes no empty text
            models.UUIDField(default=None),
        ],
        ids=["number", "text", "blank-number", "no-default"],
    )
    def test_a_required_field(self, field):
        class Bad(EventLog):
            tenant = field

        [message] = check_logs()
        assert message.id == "outbox.E021"
        assert "'tenant'" in message.msg

    def test_fields_that_fill_themselves(self):
        class Good(EventLog):
            text = models.CharField(max_length=10, blank=True)
            added = models.DateTimeField(auto_now_add=True)
            number = models.IntegerField(default=0)
            other = models.IntegerField(db_default=0)
            nothing = models.IntegerField(null=True)

        assert check_logs() == []

    def test_foreign_keys(self):
        class Person(models.Model):
            pass

        class Log(EventLog):
            by = models.ForeignKey(Person, models.PROTECT, null=True)

        class Note(models.Model):
            event = models.ForeignKey(Log, models.CASCADE)
            quiet = models.ForeignKey(Log, models.DO_NOTHING, db_constraint=False, related_name="+")

        class Tag(models.Model):
            logs = models.ManyToManyField(Log)

        messages = check_logs()
        assert set(ids(messages)) == {"outbox.E022"}
        assert [m.msg.split()[3] for m in messages] == ["Log.by", "Note.event", "Tag_logs.log"]

    def test_two_logs_of_one_table_are_said_by_django(self, settings):
        settings.DATABASE_ROUTERS = []

        class One(EventLog):
            class Meta(EventLog.Meta):
                db_table = "one"

        class Two(EventLog):
            class Meta(EventLog.Meta):
                db_table = "one"

        found = checks.model_checks.check_all_models([_Config([One, Two])])
        assert "models.E028" in ids(found)

    def test_only_the_apps_that_are_asked_for(self):
        class Bad(EventLog):
            class Meta:
                db_table = "bad"

        assert check_logs(app_configs=[]) == []


class _Config:
    def __init__(self, found):
        self.found = found

    def get_models(self):
        return self.found


def start(alias: str) -> str:
    """Have a subscription start. Returns why it stands still."""

    @subscriber("any")
    def handle(events):
        raise AssertionError(events)

    runner = Runner([subscriber_named("any")])
    runner.run(once=True)
    return Cursor.objects.using(alias).get(subscription="any").error


@pytest.fixture
def run(alias):
    """``run(sql)``: execute a statement on the alias."""

    def run(*statements):
        with connections[alias].cursor() as cursor:
            for sql in statements:
                cursor.execute(sql)

    return run


@pytest.fixture
def changed(run):
    """``with changed(sql, back):`` change the schema for the time of the block."""

    @contextmanager
    def change(sql, back):
        run(sql)
        try:
            yield
        finally:
            run(back)

    return change


@pytest.mark.django_db(transaction=True)
def test_a_migrated_database_is_well(alias):
    assert [*check_log_tables(databases=[alias])] == []
    assert [*check_log_tables(databases=None)] == []


@pytest.mark.django_db(transaction=True)
def test_tables_need_not_exist(alias, monkeypatch):
    introspection = connections[alias].introspection
    monkeypatch.setattr(introspection, "table_names", lambda cursor=None: ["auth_user"])
    assert [*check_log_tables(databases=[alias])] == []


def assert_found(alias, id, text, hint):
    """It is said by the check, and refused when a subscription starts."""
    [message] = check_log_tables(databases=[alias])
    assert message.id == id
    assert text in message.msg
    assert hint in message.hint
    error = start(alias)
    assert error.startswith("UnsafeLog: ")
    assert id in error or text in error


@pytest.mark.django_db(transaction=True)
@on("mariadb")
class TestMySQL:
    def test_engine(self, alias, changed):
        # MyISAM's keys are too short for the stream on MySQL.
        stream = Event._meta.get_field("stream")
        kept = f"MODIFY stream {stream.db_type(connections[alias])} COLLATE {{}} NOT NULL"
        kept = kept.format(exact_collation(connections[alias]))
        short = kept.replace(f"({stream.max_length})", "(100)")
        with changed(
            f"ALTER TABLE outbox_event {short}, ENGINE = MyISAM",
            f"ALTER TABLE outbox_event {kept}, ENGINE = InnoDB",
        ):
            [message] = check_databases(databases=[alias])
            back = "ALTER TABLE outbox_event ENGINE = InnoDB"
            assert (message.id, message.hint) == ("outbox.E008", back)
            assert ids(check_log_tables(databases=[alias])) == []
            assert "outbox_event has engine MyISAM" in start(alias)
            with changed(
                "RENAME TABLE outbox_stagedjob TO x", "RENAME TABLE x TO outbox_stagedjob"
            ):
                assert ids(check_log_tables(databases=[alias])) == ["outbox.E008"]

    def test_collation_of_a_log_of_ones_own(self, alias, run):
        run("ALTER TABLE ledger CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci")
        [message] = check_databases(databases=[alias])
        assert message.id == "outbox.E009"
        convert = message.hint.rpartition(": ")[2]
        run(convert, "ALTER TABLE ledger ADD extra json")  # JSON has a collation of its own
        try:
            assert check_databases(databases=[alias]) == []
        finally:
            run("ALTER TABLE ledger DROP extra")

    def test_steps(self, alias, changed):
        with changed("SET auto_increment_increment = 2", "SET auto_increment_increment = 1"):
            assert {*ids(check_log_tables(databases=[alias]))} == {"outbox.E013"}
            assert "auto_increment_increment = 2" in start(alias)

    @pytest.mark.parametrize(
        ("table", "sql"),
        [
            ("outbox_event", "ADD CONSTRAINT extra FOREIGN KEY (txid) REFERENCES ledger (id)"),
            ("outbox_gap", "ADD CONSTRAINT extra FOREIGN KEY (first) REFERENCES outbox_event (id)"),
        ],
    )
    def test_foreign_keys(self, alias, changed, table, sql):
        back = f"ALTER TABLE {table} DROP FOREIGN KEY extra"
        with changed(f"ALTER TABLE {table} {sql}", back):
            messages = [*check_log_tables(databases=[alias])]
            assert set(ids(messages)) == {"outbox.E014"}
            assert all(back in message.hint for message in messages)
            assert f"The foreign key extra from {table} " in start(alias)

    @pytest.mark.parametrize(
        ("variables", "found"),
        [
            ({"wsrep_on": "ON"}, True),
            ({"group_replication_group_name": "x"}, True),
            (
                {
                    "group_replication_group_name": "x",
                    "group_replication_single_primary_mode": "ON",
                },
                False,
            ),
            ({"wsrep_on": "OFF", "group_replication_group_name": ""}, False),
        ],
    )
    def test_clusters(self, alias, monkeypatch, variables, found):
        """Such a cluster is told by its variables; there is none here to ask."""
        answer = {"auto_increment_increment": "1", "read_only": "OFF", **variables}
        run = LogReader.run
        monkeypatch.setattr(
            LogReader,
            "run",
            lambda reader, sql, params: (
                list(answer.items()) if sql.startswith("SHOW") else run(reader, sql, params)
            ),
        )
        assert set(ids(check_log_tables(databases=[alias]))) == (
            {"outbox.E013"} if found else set()
        )


@pytest.mark.django_db(transaction=True)
@on("postgres")
class TestPostgreSQL:
    @pytest.mark.parametrize("sql", ["SET DEFAULT 0", "DROP DEFAULT"])
    def test_the_transaction_is_not_the_default(self, alias, changed, sql):
        right = "(pg_current_xact_id()::text::bigint)"
        back = f"ALTER TABLE outbox_event ALTER txid SET DEFAULT {right}"
        with changed(f"ALTER TABLE outbox_event ALTER txid {sql}", back):
            assert_found(alias, "outbox.E017", "Column txid of outbox_event", right)

    @pytest.mark.parametrize(
        "sql", ["CACHE 5", "CYCLE", "INCREMENT -1 MAXVALUE 9223372036854775807"]
    )
    def test_the_sequence_gives_out_positions_in_no_order(self, alias, changed, sql):
        name = "outbox_event_id_seq"
        back = f"ALTER SEQUENCE {name} CACHE 1 INCREMENT 1 NO CYCLE"
        with changed(f"ALTER SEQUENCE {name} {sql}", back):
            assert_found(alias, "outbox.E018", "sequence of outbox_event.id", "CACHE 1")


@pytest.mark.django_db(transaction=True)
@on("default")
def test_sqlite_without_autoincrement(alias, run):
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT sql FROM sqlite_master WHERE name = 'outbox_event'")
        [(sql,)] = cursor.fetchall()
    run("ALTER TABLE outbox_event RENAME TO kept", sql.replace(" AUTOINCREMENT", ""))
    try:
        [message] = check_log_tables(databases=[alias])
        assert message.id == "outbox.E015"
        assert "no AUTOINCREMENT" in start(alias)
    finally:
        run("DROP TABLE outbox_event", "ALTER TABLE kept RENAME TO outbox_event")


def test_a_real_standby(django_db_blocker):
    if "postgres" not in connections:
        pytest.skip("no postgres")
    with PostgreSQL() as primary, django_db_blocker.unblock():
        with alias_for(primary.url) as alias, connections[alias].schema_editor() as editor:
            editor.create_model(Event)
        with Standby(primary) as standby, alias_for(standby.url) as alias:
            messages = [*check_log_tables(databases=[alias])]
            assert ids(messages) == ["outbox.E011"]
            assert "standby" in messages[0].msg


@pytest.mark.parametrize("kind", ["mariadb"])
def test_a_real_replica(kind, django_db_blocker):
    """As far as it can be told from one: it is read-only."""
    if MARIADB not in connections:
        pytest.skip("no mariadb")
    with MARIADB_SERVER() as server, django_db_blocker.unblock(), alias_for(server.url) as alias:
        with connections[alias].schema_editor() as editor:
            editor.create_model(Event)
        with connections[alias].cursor() as cursor:
            cursor.execute("SET GLOBAL read_only = ON")
        [message] = check_log_tables(databases=[alias])
        assert message.id == "outbox.E011"
        assert "read-only" in message.msg
