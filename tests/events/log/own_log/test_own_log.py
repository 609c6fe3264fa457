"""A model derived from EventLog is a log: published to, read, subscribed to, migrated, pruned."""

from __future__ import annotations

import re
from io import StringIO
from pathlib import Path

import pytest
from django.apps import apps
from django.core.management import call_command
from django.db import connections, transaction
from django.db.migrations.autodetector import MigrationAutodetector
from django.db.migrations.loader import MigrationLoader
from django.db.migrations.questioner import NonInteractiveMigrationQuestioner
from django.db.migrations.state import ProjectState

from outbox_app.events import NO_STREAM, publish, subscriber
from outbox_app.events.exceptions import ReplayRefused, VersionConflict
from outbox_app.events.log.reader import LogReader
from outbox_app.events.log.registry import all_logs, log_named
from outbox_app.events.models import Cursor, Event, StreamHead
from outbox_app.events.subscriptions import control
from outbox_app.events.testing import published_events

from .models import Ledger, Visit


def test_logs_are_found_by_table_and_by_label():
    assert {Event, Ledger, Visit} <= set(all_logs())
    for name in ("ledger", "own_log.Ledger", "own_log.ledger"):
        assert log_named(name) is Ledger


@pytest.mark.django_db
@pytest.mark.usefixtures("in_atomic")
def test_each_log_has_streams_and_message_ids_of_its_own(alias):
    events = [publish("a", "made", log=log) for log in (Ledger, Visit, Event, Ledger)]
    assert [event.version for event in events] == [1, 1, 1, 2]
    again = publish("a", "made", log=Visit, message_id=events[0].message_id)
    assert (type(again), again.version) == (Visit, 2)
    heads = StreamHead.objects.using(alias).order_by("log").values_list("log", "version")
    assert list(heads) == [("ledger", 2), ("outbox_event", 1), ("own_log_visit", 2)]
    for log, version in ((Ledger, 2), (Event, 1)):
        with pytest.raises(VersionConflict, match=log._meta.db_table) as conflict:
            publish("a", "made", log=log, expected_version=NO_STREAM)
        assert conflict.value.current == version


@pytest.mark.django_db
@pytest.mark.usefixtures("in_atomic")
def test_heads_that_were_set_back(alias):
    """The SQL of docs/howto/restore.md."""
    for stream in ("a", "b", "a", "c", "a"):
        publish(stream, "made", log=Ledger)
    heads = StreamHead.objects.using(alias).filter(log="ledger")
    heads.filter(stream="a").update(version=1)
    heads.filter(stream="b").delete()
    heads.filter(stream="c").update(version=7)  # its last versions were pruned
    page = Path(__file__).parents[4] / "docs/howto/restore.md"
    [sql] = re.findall(r"```sql\n(.*?)```", page.read_text(), re.DOTALL)
    with connections[alias].cursor() as cursor:
        for statement in sql.replace("shop_payment_event", "ledger").strip(";\n").split(";"):
            cursor.execute(statement)
    versions = [publish(stream, "made", log=Ledger).version for stream in "abc"]
    assert versions == [4, 2, 8]


@pytest.mark.django_db(transaction=True)
def test_it_is_read_exactly(alias):
    with transaction.atomic(using=alias):
        publish("a", "made", {"n": 1}, log=Ledger)
        publish("a", "other log")
    reader = LogReader(Ledger, using=alias)
    [event] = reader.read(reader.window.start(0), 10).events
    assert (event.log, event.type, event.data) == ("ledger", "made", {"n": 1})
    reader.close()


@pytest.mark.django_db(transaction=True)
def test_several_logs_feed_one_subscription(alias, published, run):
    seen = []

    @subscriber("joins", logs=[Ledger, "own_log.Visit"], partitions=2)
    def handle(events):
        seen.extend((event.log, event.stream, event.version) for event in events)

    published("a", "b", log=Ledger)
    published("a", log=Visit)
    published("a")  # a log that it does not read
    assert run("joins") == 3
    assert sorted(seen) == [("ledger", "a", 1), ("ledger", "b", 1), ("own_log_visit", "a", 1)]
    published("a", log=Visit)
    run("joins")
    assert seen[3:] == [("own_log_visit", "a", 2)]
    cursors = Cursor.objects.using(alias).order_by("log", "partition")
    assert list(cursors.values_list("log", "partition")) == [
        ("ledger", 0),
        ("ledger", 1),
        ("own_log_visit", 0),
        ("own_log_visit", 1),
    ]


@pytest.mark.django_db(transaction=True)
def test_a_position_of_one_log_moves_no_cursor_in_another(alias, published, run):
    @subscriber("joins", logs=[Ledger, Visit])
    def handle(events):
        pass

    for log in (Ledger, Visit):
        published("a", "b", log=log)
    run("joins")
    state = list(Cursor.objects.using(alias).order_by("log").values_list("state", flat=True))
    first = Visit.objects.using(alias).order_by("id").first().pk
    for move in (control.plan, control.replay):
        with pytest.raises(ReplayRefused, match="several logs"):
            move("joins", first)
    cursors = Cursor.objects.using(alias).order_by("log")
    assert list(cursors.values_list("state", flat=True)) == state
    control.replay("joins", first, log="own_log_visit")
    assert cursors[0].state == state[0]
    assert run("joins") == 1
    control.replay("joins", "beginning")
    assert run("joins") == 4


@pytest.mark.django_db(transaction=True)
def test_rows_that_its_default_manager_hides_are_events(alias, published, run):
    @subscriber("joins", logs=[Visit])
    def handle(events):
        pass

    assert not Visit.opened.using(alias).filter(topic="closed").exists()
    with transaction.atomic(using=alias):
        event = publish("a", "made", log=Visit, topic="closed")
        given = {"log": Visit, "topic": "closed", "message_id": event.message_id}
        assert publish("a", "made", **given) == event
        assert [each.version for each in published_events(log=Visit, using=alias)] == [1]
    run("joins")
    control.replay("joins", event.pk)
    assert run("joins") == 0
    control.replay("joins", event.recorded_at)
    assert run("joins") == 1


@pytest.mark.django_db(transaction=True)
def test_it_is_pruned_by_its_name(alias, published):
    for log in (Ledger, Visit):
        published("a", "b", log=log)
        log.objects.using(alias).update(recorded_at="2020-01-01T00:00Z")
    output = StringIO()
    call_command("outbox_prune", "--events", "--log", "ledger", "--older-than=1", stdout=output)
    assert "pruned log=ledger removed=2 older_than=1d" in output.getvalue()
    assert (Ledger.objects.using(alias).count(), Visit.objects.using(alias).count()) == (0, 2)


def test_makemigrations_finds_its_index_and_its_constraint():
    empty = ProjectState()
    found = MigrationAutodetector(
        empty, ProjectState.from_apps(apps), NonInteractiveMigrationQuestioner()
    )._detect_changes(convert_apps={"own_log"})
    made = {op.name: op.options for op in found["own_log"][0].operations}
    [index] = made["Visit"]["indexes"]
    assert index.name.startswith("own_log_vis_txid_")
    assert [c.name for c in made["Visit"]["constraints"]] == ["own_log_visit_version"]
    assert [index.name for index in made["Ledger"]["indexes"]][-1] == "ledger_topic"
    assert made["Ledger"]["indexes"][0].fields == ["txid", "id"]
    assert [c.name for c in made["Ledger"]["constraints"]] == ["own_log_ledger_version"]


def test_its_migration_is_complete():
    loader = MigrationLoader(None)
    found = MigrationAutodetector(loader.project_state(), ProjectState.from_apps(apps))
    assert "own_log" not in found.changes(graph=loader.graph)


@pytest.mark.django_db
@pytest.mark.usefixtures("in_atomic")
@pytest.mark.parametrize("stream", ["A", "a ", "á"])
def test_its_columns_compare_byte_by_byte(alias, stream):
    publish("a", "made", log=Visit)
    assert not Visit.objects.using(alias).filter(stream=stream).exists()
    with connections[alias].cursor() as cursor:
        constraints = connections[alias].introspection.get_constraints(cursor, "own_log_visit")
    columns = [c["columns"] for c in constraints.values() if c["unique"]]
    assert {("message_id",), ("stream", "version")} <= {tuple(c) for c in columns}
