"""The findings of ``manage.py check --database`` in a real database."""

from __future__ import annotations

import pytest
from django.core.checks import WARNING, Tags, run_checks
from django.core.checks.registry import registry
from django.db import connections, models
from django.db.migrations.recorder import MigrationRecorder
from django.test.utils import isolate_apps

from outbox_app import stage
from outbox_app.checks.databases import (
    ROWS,
    _check_keys,
    check_databases,
    check_keys,
    check_sessions,
    check_sqlite,
    check_tables,
)
from outbox_app.entities.exceptions import DamagedEntity
from outbox_app.events.models import EventLog
from outbox_app.exceptions import InvalidArgument
from outbox_app.fields import CharField, exact_collation
from outbox_app.models import StagedJob
from outbox_app.process.preflight import require_alias
from tests import tasks
from tests.entities.models import Account
from tests.one_database import no_statement


def ids(messages):
    return [message.id for message in messages]


@pytest.fixture
def run(alias):
    """``run(sql)``: execute a statement on the alias."""

    def run(sql):
        with connections[alias].cursor() as cursor:
            cursor.execute(sql)

    return run


def test_a_migrated_database_is_well(alias):
    assert check_databases(databases=[alias]) == []
    assert check_databases(databases=None) == []


class Elsewhere:
    """A router that places entities on another alias than jobs."""

    def db_for_write(self, model, **hints):
        return "events" if model._meta.app_label == "outbox_entities" else "default"

    def allow_migrate(self, db, app_label, **hints):
        return app_label != "outbox_prepared"


@pytest.mark.django_db
def test_tables_are_expected_where_routers_place_them(monkeypatch, settings):
    monkeypatch.setattr(connections["default"].introspection, "table_names", lambda *_: [])
    settings.DATABASE_ROUTERS = ["tests.checks.test_databases.Elsewhere"]
    settings.OUTBOX = {"INBOX_DATABASE": "inbox"}
    found = " ".join(each.msg for each in check_tables(databases=["default"]))
    assert "outbox_app:" in found
    assert "outbox_app.events:" in found
    assert "outbox_inbox" not in found
    assert "outbox_app.entities:" not in found
    assert "outbox_app.prepared:" not in found


def test_an_empty_default(monkeypatch):
    """Projects whose models are all on other aliases leave ``default`` empty."""
    empty = connections.configure_settings({"default": {}})["default"]
    monkeypatch.setitem(connections.settings, "empty", empty)
    assert not [m for m in run_checks(databases=["empty"]) if "empty" in m.msg]
    with pytest.raises(InvalidArgument, match=r"no such alias\. Known: default"):
        require_alias("empty")
    del connections["empty"]  # other tests have an alias of this name
    monkeypatch.setitem(connections.settings, "legacy", {**empty, "ENGINE": "no_such_driver"})
    require_alias("default")


@pytest.mark.usefixtures("in_atomic")
def test_runs_for_the_named_databases_only(alias, make_app):
    stage("unknown", using=alias, app=make_app())
    ours = [m for m in run_checks(databases=[alias]) if m.id == "outbox.W011"]
    assert len(ours) == 1
    assert not [m for m in run_checks() if m.id == "outbox.W011"]
    assert "outbox.W011" in ids(run_checks(tags=[Tags.database], databases=[alias]))


@pytest.mark.usefixtures("in_atomic")
def test_tables_need_not_exist(alias, monkeypatch, make_app):
    stage("unknown", using=alias, app=make_app())
    introspection = connections[alias].introspection
    monkeypatch.setattr(introspection, "table_names", lambda cursor=None: ["auth_user"])
    assert check_databases(databases=[alias]) == []


@pytest.mark.usefixtures("in_atomic")
def test_unknown_tasks_of_staged_jobs(alias, make_app, django_assert_max_num_queries):
    app = make_app()
    known = app.task(name="known", shared=False)(tasks.add)
    stage(known, (1, 1), using=alias)
    for i in range(7):
        stage(f"gone-{i}", using=alias, app=app)
    stage("else", using=alias, app=make_app())
    StagedJob.objects.using(alias).filter(task="else").update(app="unloaded")

    messages = check_databases(databases=[alias])
    assert sorted(ids(messages)) == ["outbox.W010", "outbox.W011"]
    unloaded, unknown = sorted(messages, key=lambda message: message.id)
    assert "'unloaded'" in unloaded.msg
    assert "gone-0, gone-1, gone-2, gone-3, gone-4 and 2 more" in unknown.msg
    assert "known" not in unknown.msg.replace("unknown", "")


@pytest.mark.usefixtures("in_atomic")
def test_looks_at_the_oldest_jobs_only(alias, make_app, monkeypatch):
    app = make_app()
    monkeypatch.setattr("outbox_app.checks.databases.ROWS", 3)
    known = app.task(name="known", shared=False)(tasks.add)
    for _ in range(3):
        stage(known, (1, 1), using=alias)
    stage("gone", using=alias, app=app)
    assert check_databases(databases=[alias]) == []
    assert ROWS == 1000


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("alias", ["mariadb"], indirect=True)
class TestMySQL:
    """DDL commits, so each test puts the table back."""

    def test_engine(self, alias, run):
        run("ALTER TABLE outbox_incident ENGINE = MyISAM")
        try:
            [message] = check_databases(databases=[alias])
        finally:
            run("ALTER TABLE outbox_incident ENGINE = InnoDB")
        assert message.id == "outbox.E008"
        assert "outbox_incident" in message.msg
        assert message.hint == "ALTER TABLE outbox_incident ENGINE = InnoDB"

    @pytest.mark.parametrize("charset", ["latin1", "utf8mb4"])
    def test_collation(self, alias, run, charset):
        run(f"ALTER TABLE outbox_process CONVERT TO CHARACTER SET {charset}")
        try:
            [message] = check_databases(databases=[alias])
        finally:
            run(message.hint)
        assert message.id == "outbox.E009"
        assert "host" in message.msg
        assert check_databases(databases=[alias]) == []

    def test_columns_of_json_are_no_keys(self, alias, run):
        """New ones are utf8mb4_bin on MariaDB: no collation of a test database was right."""
        run("ALTER TABLE outbox_subscription MODIFY `reads` json")
        assert check_databases(databases=[alias]) == []

    @pytest.fixture
    def mixed(self, alias, run):
        """The ids of accounts compare without case, and so does a column of the project's own."""
        exact = exact_collation(connections[alias])
        run("ALTER TABLE account ADD name varchar(9) COLLATE utf8mb4_general_ci")
        try:
            assert check_databases(databases=[alias]) == []
            run("ALTER TABLE account CONVERT TO CHARACTER SET utf8mb4 COLLATE utf8mb4_general_ci")
            yield
        finally:
            run("ALTER TABLE account DROP name")
            run(f"ALTER TABLE account CONVERT TO CHARACTER SET utf8mb4 COLLATE {exact}")

    @pytest.mark.usefixtures("mixed")
    def test_ids_of_entities_compare_byte_by_byte(self, alias):
        """Else the command of "A" is answered by "a". Further columns are the project's."""
        [message] = check_databases(databases=[alias])
        assert message.id == "outbox.E009"
        assert "id (utf8mb4_general_ci). Keys" in message.msg
        assert message.hint.startswith("Run manage.py makemigrations, and migrate --database")

    @pytest.mark.usefixtures("mixed")
    def test_no_error_stops_the_migrate_that_corrects_the_column(self, alias):
        """``migrate`` checks first. With the last migration applied, nothing would correct it."""
        recorder, name = MigrationRecorder(connections[alias]), "0003_more_columns_of_people"
        recorder.record_unapplied("entities", name)
        try:
            [message] = check_databases(databases=[alias])
        finally:
            recorder.record_applied("entities", name)
        assert message.id == "outbox.W048"
        assert message.level == WARNING
        assert "id (utf8mb4_general_ci). Keys" in message.msg
        assert ids(check_databases(databases=[alias])) == ["outbox.E009"]

    @pytest.mark.usefixtures("mixed")
    def test_a_command_names_the_column_that_takes_two_ids_for_one(self, alias):
        Account.execute("casey", "open", {"owner": "C"}, command_id="1", using=alias)
        with pytest.raises(DamagedEntity, match=r"not distinguish 'Casey' from 'casey'.*migrate"):
            Account.execute("Casey", "open", {"owner": "C"}, command_id="2", using=alias)

    def test_a_key_of_ones_own_that_does_not(self, alias):
        """Without a query: the field that replaces an inherited one is a plain one of Django's."""
        with isolate_apps("tests"):

            class Parcel(EventLog):
                stream = models.CharField(max_length=40)
                type = CharField(max_length=40)

                class Meta(EventLog.Meta):
                    app_label = "tests"

            with no_statement(alias):
                [message] = _check_keys(Parcel, alias)
                assert not [*_check_keys(Parcel, "default")]
        assert message.id == "outbox.E009"
        assert "stream does" in message.msg
        assert "outbox_app.fields.CharField" in message.hint

    def test_sql_mode(self, alias, run):
        run("SET sql_mode = ''")
        try:
            assert ids(check_databases(databases=[alias])) == ["outbox.E025"]
        finally:
            connections[alias].close()


def test_checks_of_a_deployment_stop_no_migrate():
    """``migrate`` runs the checks of databases, but not those of a deployment."""
    run = registry.get_checks(include_deployment_checks=False)
    kept = {each.__wrapped__ for each in run if hasattr(each, "__wrapped__")}
    assert check_databases in kept
    assert check_keys in kept
    assert not kept & {check_sessions, check_sqlite}
