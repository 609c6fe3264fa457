"""Database users with few privileges: what is missing is named, and nothing is sent or skipped."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from uuid import uuid4

import pytest
from django.core.checks import run_checks
from django.core.management import CommandError, call_command
from django.db import connections, transaction

from outbox_app import stage_many
from outbox_app.database.clock import DatabaseNow
from outbox_app.entities import Command
from outbox_app.events import subscriber
from outbox_app.events.exceptions import UnsafeLog
from outbox_app.events.log.reader import LogReader
from outbox_app.events.log.registry import all_logs
from outbox_app.events.models import Cursor, Event
from outbox_app.events.subscriptions.runner import Runner
from outbox_app.events.subscriptions.subscriber import subscriber_named
from outbox_app.models import DeadJob, StagedJob
from outbox_app.monitoring.status import outbox_status
from tests import tasks
from tests.entities.models import Account
from tests.faults.tools import on
from tests.tables import every_model

pytestmark = pytest.mark.django_db(transaction=True)

GUIDE = Path(__file__).parents[2] / "docs/howto/database-users.md"


def of_guide(process):
    """Return what the guide grants to a process: tables by privileges."""
    granted, current = {}, ""
    for line in GUIDE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and (tables := re.findall(r"`(outbox_\w+)`", cells[1])):
            current = cells[0] or current
            if current == process:
                granted.setdefault(cells[2], []).extend(tables)
    return granted


OF_SUBSCRIPTIONS = of_guide("`run_subscriptions`")


@pytest.fixture
def role(alias):
    """``role({"SELECT": ["outbox_event"]})``: the alias connects as a user with these privileges.

    On PostgreSQL the user sees the schema, unless ``usage`` is False.
    """
    name, own = f"outbox_{uuid4().hex[:12]}", connections[alias]
    before = dict(own.settings_dict)
    mysql = own.vendor == "mysql"
    user = f"{name}@'%%'" if mysql else name

    def execute(*statements):
        with own.cursor() as cursor:
            for sql in statements:
                cursor.execute(sql)

    def use(granted, *, usage=True):
        execute(
            f"CREATE USER {user} " + ("IDENTIFIED BY 'x'" if mysql else ""),
            *(f"GRANT {what} ON {t} TO {user}" for what, all in granted.items() for t in all),
        )
        if not mysql:
            execute("REVOKE ALL ON SCHEMA public FROM PUBLIC")
            execute(f"GRANT USAGE ON SCHEMA public TO {user}") if usage else None
        use.again()

    def again():
        own.close()
        own.settings_dict.update(USER=name, PASSWORD="x")

    def undo():
        own.close()
        own.settings_dict.update(before)

    use.undo, use.again, use.name = undo, again, name
    yield use
    undo()
    if not mysql:
        execute("GRANT USAGE ON SCHEMA public TO PUBLIC", f"DROP OWNED BY {user}")
    execute(f"DROP USER {user}")


def command(name, alias, **options):
    return call_command(name, "--once", database=alias, skip_checks=True, **options)


@on("postgres", "mariadb")
@pytest.mark.parametrize("name", ["drain_outbox", "run_outbox"])
def test_jobs_that_could_not_be_deleted_are_not_published(
    alias, role, make_app, publishes, caplog, name
):
    """They would go out again with each start."""
    note = make_app().task(name="note")(tasks.note)
    with transaction.atomic(using=alias):
        note.delay("", 1)
    tables = {model._meta.db_table for model in every_model()}
    others = tables - {"outbox_stagedjob"}
    role({"SELECT, INSERT, UPDATE, DELETE": others, "SELECT, UPDATE": ["outbox_stagedjob"]})
    if name == "run_outbox":  # its other parts go on
        with pytest.raises(SystemExit):
            command(name, alias)
        assert "DELETE on outbox_stagedjob" in caplog.text
    else:
        for processes in [{}, {"processes": 2}]:
            with pytest.raises(CommandError, match="DELETE on outbox_stagedjob") as refused:
                command(name, alias, **processes)
            assert refused.value.returncode == 2
    assert publishes == []
    assert StagedJob.objects.using(alias).count() == 1


@on("postgres", "mariadb")
def test_subscriptions_need_no_privilege_on_jobs(alias, role, published):
    """MariaDB does not list a table on which the user has none: it was said to be missing."""
    seen = []
    subscriber("one", start="beginning")(seen.extend)
    published("a", "b")
    role(OF_SUBSCRIPTIONS)
    command("run_subscriptions", alias)
    assert len(seen) == 2


@on("mariadb")
def test_a_privilege_that_is_missing_is_named(alias, role):
    role({"SELECT": ["outbox_event"]})
    with pytest.raises(CommandError, match=r"SELECT.* denied .*outbox_stagedjob"):
        command("drain_outbox", alias)


@on("postgres")
def test_a_schema_that_the_user_may_not_use(alias, role):
    role({}, usage=False)
    with pytest.raises(CommandError, match=r"no table outbox_stagedjob.*GRANT USAGE.*search_path"):
        command("drain_outbox", alias)


@on("mariadb")
def test_a_foreign_key_is_seen_without_privileges_on_its_other_table(alias, role):
    """A user without them read on, and would have passed over events."""
    reader = LogReader(Event, using=alias)
    state = reader.window.start(0)
    change = "ALTER TABLE outbox_event {}"
    with connections[alias].cursor() as cursor:
        cursor.execute(
            change.format("ADD CONSTRAINT extra FOREIGN KEY (txid) REFERENCES outbox_gap (id)")
        )
    try:
        role({"SELECT, INSERT": ["outbox_event"]})
        with pytest.raises(UnsafeLog, match="foreign key extra from outbox_event to outbox_gap"):
            reader.verify(state)
    finally:
        role.undo()
        with connections[alias].cursor() as cursor:
            cursor.execute(change.format("DROP FOREIGN KEY extra"))


@on("postgres")
def test_row_level_security_hides_no_event_unnoticed(alias, role, published, run):
    """The cursor passed over the events that a policy hid."""
    seen = []
    subscriber("one", start="beginning")(seen.extend)
    policy = "CREATE POLICY {} ON outbox_event FOR SELECT USING ({})"
    with connections[alias].cursor() as cursor:
        cursor.execute("ALTER TABLE outbox_event ENABLE ROW LEVEL SECURITY")
        cursor.execute(policy.format("own", "topic = 'mine'"))
    try:
        published("a")
        role(OF_SUBSCRIPTIONS)
        runner = Runner([subscriber_named("one")])
        runner.run(once=True)
        assert "USING (true)" in runner.trouble
        assert not Cursor.objects.using(alias).exists()
        role.undo()
        with connections[alias].cursor() as cursor:
            cursor.execute(policy.format("every", "true"))
        role.again()
        run("one")
    finally:
        role.undo()
        with connections[alias].cursor() as cursor:
            cursor.execute("ALTER TABLE outbox_event DISABLE ROW LEVEL SECURITY")
            cursor.execute("DROP POLICY IF EXISTS own ON outbox_event")
            cursor.execute("DROP POLICY IF EXISTS every ON outbox_event")
    assert [event.stream for event in seen] == ["a"]


@on("postgres")
@pytest.mark.parametrize(
    ("every", "own"),
    [
        ("FOR SELECT TO pg_monitor USING (true)", "USING (topic = 'mine')"),
        ("USING (true)", "AS RESTRICTIVE FOR SELECT USING (topic = 'mine')"),
    ],
)
def test_a_policy_that_shows_all_to_others_or_beside_a_restrictive_one(
    alias, role, published, every, own
):
    """It was taken for one that shows all, and the cursor passed over the events."""
    published("a")
    reader = LogReader(Event, using=alias)
    change = "ALTER TABLE outbox_event {} ROW LEVEL SECURITY"
    role({"SELECT": ["outbox_event"]})
    state = reader.window.start(0)
    role.undo()
    with connections[alias].cursor() as cursor:
        cursor.execute(change.format("ENABLE"))
        cursor.execute(f"CREATE POLICY every ON outbox_event {every}")
        cursor.execute(f"CREATE POLICY own ON outbox_event {own}")
    try:
        role.again()
        assert not Event.objects.using(alias).exists()
        with pytest.raises(UnsafeLog, match="may hide events"):
            reader.read(state, 10)
    finally:
        role.undo()
        with connections[alias].cursor() as cursor:
            cursor.execute(change.format("DISABLE"))
            cursor.execute("DROP POLICY every ON outbox_event")
            cursor.execute("DROP POLICY own ON outbox_event")


@on("postgres")
def test_row_level_security_as_the_guide_sets_it(alias, role, published, run):
    """Without a policy of its own, code that publishes was refused."""
    seen = []
    subscriber("one", start="beginning")(seen.extend)
    sql = re.search(r"```sql\n(.*?)```", GUIDE.read_text(), re.DOTALL)[1]
    role(OF_SUBSCRIPTIONS | of_guide("code that publishes events"))
    role.undo()
    try:
        with connections[alias].cursor() as cursor:
            cursor.execute(re.sub(r"\bshop_\w+", role.name, sql))
        role.again()
        published("a", "b")
        run("one")
    finally:
        role.undo()
        with connections[alias].cursor() as cursor:
            cursor.execute("ALTER TABLE outbox_event DISABLE ROW LEVEL SECURITY")
    assert len(seen) == 2


@on("postgres", "mariadb")
class TestTheGuide:
    """What it grants is enough. Subscriptions have a test above."""

    @pytest.fixture
    def note(self, make_app):
        return make_app().task(name="note")(tasks.note)

    def test_code_that_stages(self, alias, role, note):
        role(of_guide("code that stages jobs"))
        with transaction.atomic(using=alias):
            note.delay("", 1)
            stage_many(note.s("", i) for i in range(3))
        role.undo()
        assert StagedJob.objects.using(alias).count() == 4

    def test_code_that_publishes(self, alias, role, published):
        role(of_guide("code that publishes events"))
        published("a", "b", "a")
        published("b", expected_version=1)
        role.undo()
        assert Event.objects.using(alias).count() == 4

    def test_commands_of_entities(self, alias, role):
        granted = of_guide("commands of [entities](model-to-entity.md)")
        granted["SELECT, INSERT, UPDATE"].append("account")
        role({**granted, "SELECT, INSERT": ["account_version"]})  # as the guide says of a log
        Account.execute("a", "open", {"owner": "ann"}, command_id="1", using=alias)
        again = [Command("a", "date", command_id=id) for id in "223"]
        assert {each.version for each in Account.execute_many(again, using=alias)} == {2, 3}

    def test_a_subscription_with_a_task(self, alias, role, make_app, published):
        def one(event): ...

        subscriber("one", start="beginning", task=make_app().task(name="one")(one))
        published("a")
        role({**OF_SUBSCRIPTIONS, "INSERT": ["outbox_stagedjob"]})
        command("run_subscriptions", alias)
        role.undo()
        assert StagedJob.objects.using(alias).count() == 1

    def test_what_runs_everything(self, alias, role, note, published, caplog):
        published("a")
        long_ago = DatabaseNow() - timedelta(days=9)
        Event.objects.using(alias).update(recorded_at=long_ago)
        with transaction.atomic(using=alias):
            note.delay("", 1)
        every = [model._meta.db_table for model in every_model()]
        role(
            {
                "SELECT, INSERT, UPDATE, DELETE": {
                    *every,
                    *(log._meta.db_table for log in all_logs()),
                }
            }
        )
        command("run_outbox", alias)
        call_command("outbox_prune", "--events", older_than=1, database=alias)
        role.undo()
        assert not Event.objects.using(alias).exists()
        assert not re.search("denied|Grant", caplog.text)

    def test_a_drainer(self, alias, role, note, caplog):
        with transaction.atomic(using=alias):
            note.delay("", 1)
            note.delay("", 2)
        first = StagedJob.objects.using(alias).order_by("id")[:1].get()
        StagedJob.objects.using(alias).filter(pk=first.pk).update(envelope="nonsense")
        role(of_guide("`drain_outbox`"))
        command("drain_outbox", alias)
        role.undo()
        assert not StagedJob.objects.using(alias).exists()
        assert DeadJob.objects.using(alias).count() == 1
        assert "denied" not in caplog.text

    def test_a_reader_of_the_status(self, alias, role):
        every = [model._meta.db_table for model in every_model()]
        role({"SELECT": {*every, *(log._meta.db_table for log in all_logs())}})
        assert outbox_status(using=alias).backlog.rows == 0


@on("postgres", "mariadb")
@pytest.mark.parametrize(
    "process",
    [
        "code that stages jobs",
        "`drain_outbox`",
        "code that publishes events",
        "`run_subscriptions`",
    ],
)
def test_the_checks_run_as_each_user(alias, role, process):
    """Tables that the user cannot see are not called missing."""
    role(of_guide(process))
    messages = run_checks(tags=["database"], databases=[alias])
    assert [each for each in messages if each.id.startswith("outbox.")] == []
