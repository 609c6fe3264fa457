"""``OUTBOX["SINK"]``: a process deletes old events that are archived and passed by all readers."""

from __future__ import annotations

import contextlib
import json
from datetime import timedelta
from io import StringIO
from pathlib import Path
from uuid import uuid4

import pytest
from django.core.management import call_command
from django.db import ProgrammingError, connections
from django.db.models import QuerySet

from outbox_app import supervisor
from outbox_app.checks.values import check_settings
from outbox_app.database.clock import DatabaseNow
from outbox_app.entities.exceptions import UnknownEntity
from outbox_app.events import prune_events, subscriber
from outbox_app.events import sink as events_sink
from outbox_app.events.log import registry
from outbox_app.events.log.registry import sinks
from outbox_app.events.loops import sinking
from outbox_app.events.models import Event
from outbox_app.events.sink import Sink, sink_status
from outbox_app.models import Lease, Process
from outbox_app.pipeline.exceptions import ArchiveRefused, Unreachable
from outbox_app.pipeline.table import Archive
from outbox_app.process import backoff
from outbox_app.retention.run import Retention
from tests.entities.models import Account, AccountVersion
from tests.patience import eventually

from .harness import archive, named, publish_some

LOG = "outbox_event"

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def folder(tmp_path, settings, monkeypatch, new_log):
    """The folder of the archive; events sink into it after three days, two at a time."""
    settings.OUTBOX = {**settings.OUTBOX, "SINK": {LOG: (str(tmp_path / "archive"), 3)}}
    monkeypatch.setattr(events_sink, "BATCH_SIZE", 2)
    return str(tmp_path / "archive")


@pytest.fixture
def left(alias):
    """``left()``: the positions left in the database."""
    return lambda: list(Event.objects.using(alias).order_by("pk").values_list("pk", flat=True))


def test_what_is_archived_sinks_and_the_rest_waits_for_the_archive(alias, folder, old, left):
    old(5)
    archive(alias, folder)
    later = old(2)
    sink = Sink(Event)
    assert sink.run(once=True) == 5
    assert left() == later
    assert sink.trouble == f"held by position {later[0]}, which is not archived"
    assert not sink.has_failed
    archive(alias, folder)
    young = publish_some(alias, 1)
    sink = Sink(Event)
    assert sink.run(once=True) == 2
    assert left() == young
    assert sink.trouble == ""
    assert len(Archive.load(folder, LOG).files()) == 3


def test_the_retention_of_events_leaves_a_log_that_sinks_to_its_sink(
    alias, folder, old, left, settings
):
    """Else what the archive has not got yet is lost, as when the archiver stood for days."""
    settings.OUTBOX = {**settings.OUTBOX, "EVENT_RETENTION_DAYS": 1}
    positions = old(3)
    assert Retention(using=alias).run(once=True) == 0
    output = StringIO()
    call_command("outbox_prune", "--events", "--older-than=1", stdout=output)
    assert left() == positions
    assert f"left out log={LOG}: OUTBOX['SINK'] decides when its events" in output.getvalue()
    call_command("outbox_prune", "--events", f"--log={LOG}", stdout=output)
    assert left() == []  # a person says so


def test_the_same_log_in_a_database_in_which_it_does_not_sink_is_pruned(
    alias, folder, old, left, monkeypatch
):
    old(3)
    monkeypatch.setattr(registry, "model_alias", lambda log: "elsewhere")
    assert prune_events(using=alias, older_than=1) == 3
    assert left() == []


@pytest.mark.parametrize("command", ["run_subscriptions", "run_outbox"])
def test_what_a_subscription_has_not_passed_stays(alias, folder, old, left, command):
    handled = []

    @subscriber("picky", on_error="stop", batch_size=1)
    def picky(events):
        if len(handled) == 2:
            raise ValueError("not this one")
        handled.append(events[0].id)

    positions = old(5)
    archive(alias, folder)
    with pytest.raises(SystemExit):  # the subscription has stopped
        call_command(command, "--once", "--database", alias, stdout=StringIO())
    assert handled == positions[:2]
    assert left() == positions[2:]
    assert not Lease.objects.using(alias).filter(owner__isnull=False).exists()
    handled.append(positions[2])
    call_command(command, "--once", "--database", alias, stdout=StringIO())
    assert left() == []


def test_it_runs_beside_the_subscriptions_until_they_stop(alias, folder, old, left):
    old(3)
    archive(alias, folder)
    with sinking(alias, once=False):
        eventually(lambda: not left(), "all have sunk")
        [process] = Process.objects.using(alias).filter(resource=f"sink:{LOG}")
        assert process.trouble == ""
    assert not Process.objects.using(alias).exists()


def test_once_ends_where_the_database_refuses_to_remove(alias, folder, old, left, monkeypatch):
    """As where the role may not delete from a log that is only appended to."""
    refused = []

    def refuse(execute, sql, params, many, context):
        if sql.startswith("DELETE") and LOG in sql:
            refused.append(sql)
            assert len(refused) < 20, "It is tried without end."
            raise ProgrammingError("permission denied")
        return execute(sql, params, many, context)

    monkeypatch.setattr(backoff, "MAX_BACKOFF", 0.01)
    positions = old(3)
    archive(alias, folder)
    sink = Sink(Event)
    with connections[alias].execute_wrapper(refuse):
        assert sink.run(once=True) == 0
    assert sink.has_failed
    assert "permission denied" in sink.trouble
    assert left() == positions


def test_one_process_at_a_time(alias, folder, old, left):
    old(3)
    archive(alias, folder)
    first, second = (Sink(Event, lease_seconds=3600) for _ in range(2))
    assert first._turn() is True  # two of them
    assert second._turn() is False
    assert len(left()) == 1
    first._leave()
    second._leave()
    assert Sink(Event).run(once=True) == 1


def test_of_a_log_that_is_empty_by_now_nothing_is_held(alias, folder, old):
    old(1)
    archive(alias, folder)
    old(1)
    sink = Sink(Event)
    sink.run(once=True)
    assert "not archived" in sink.trouble
    Event.objects.using(alias).all().delete()
    sink._next = float("-inf")
    sink.run(once=True)
    assert sink.trouble == ""


@pytest.mark.slow
def test_a_process_that_has_lost_its_lease_tells_of_no_trouble_of_before(
    alias, folder, old, left, monkeypatch, settings
):
    """Another one knows better: the archive may have got on by now."""
    monkeypatch.setattr(Sink, "rest", 0.0)
    old(2)
    archive(alias, folder)
    old(2)
    first, second = (Sink(Event, lease_seconds=0.4) for _ in range(2))

    def until(sink, condition):
        eventually(lambda: (sink._step(once=False), condition())[1])

    def takes_over(sink, other):
        def has_taken_over():  # on a slow machine each may lose it to the other in between
            sink._step(once=False)
            if sink.holder.owned:
                other._step(once=False)
            return sink.holder.owned and not (other.holder.owned or other.backoff.text)

        eventually(has_taken_over)

    until(first, lambda: "not archived" in first.trouble)
    takes_over(second, first)
    assert first.trouble == ""
    settings.OUTBOX = {**settings.OUTBOX, "SINK": {LOG: (f"{folder}/nowhere", 3)}}
    until(second, lambda: second.has_failed)
    takes_over(first, second)
    assert (second.trouble, second.has_failed) == ("", False)


def test_an_archive_that_cannot_be_read_holds_its_own_log_only(
    alias, folder, old, left, settings, tmp_path, caplog
):
    nowhere = str(tmp_path / "nowhere")
    both = {"account_version": (nowhere, 3), **settings.OUTBOX["SINK"]}
    settings.OUTBOX = {**settings.OUTBOX, "SINK": both}
    old(3)
    archive(alias, folder)
    assert supervisor.run_together(using=alias, once=True) == 1
    assert left() == []
    sink = Sink(AccountVersion)
    caplog.clear()
    sink.run(once=True)
    assert sink.trouble.startswith(f"ArchiveRefused: {nowhere} is no archive")
    assert list(sink._prune()) == []  # a minute later
    assert [record.msg.split(" log=")[0] for record in caplog.records] == [
        "Old events were not removed"
    ]


def test_an_archive_that_cannot_be_read_is_told_of(alias, folder, old, left):
    ids = old(3)
    archive(alias, folder)
    file = Path(folder, named(folder)[0])
    file.unlink()
    file.mkdir()
    sink = Sink(Event)
    sink.run(once=True)
    assert sink.trouble.startswith("Unreachable: The archive cannot be read: ")
    assert left() == ids


def test_versions_of_entities_sink_by_the_same_setting(alias, settings):
    settings.OUTBOX = {**settings.OUTBOX, "SINK": {"account_version": ("x", 3)}}
    assert sinks() == {AccountVersion: ("x", 3)}
    assert sinks("elsewhere") == {}


@pytest.mark.parametrize("use_tz", [True, False])
def test_versions_that_have_sunk_are_read_from_the_archive(alias, settings, tmp_path, use_tz):
    if not use_tz:
        settings.USE_TZ, settings.TIME_ZONE = False, "Asia/Kolkata"
    to = str(tmp_path / "versions")
    settings.OUTBOX = {**settings.OUTBOX, "SINK": {"account_version": (to, 30)}}
    for n, (id, command) in enumerate([("a", "open"), ("b", "open"), ("a", "date"), ("a", "date")]):
        arguments = {"owner": id} if command == "open" else {}
        Account.execute(id, command, arguments, command_id=f"c{n}", using=alias)
    rows = QuerySet(AccountVersion, using=alias)
    newest = rows.order_by("-pk").values_list("pk", flat=True)[0]
    rows.exclude(pk=newest).update(recorded_at=DatabaseNow() - timedelta(days=31))
    told = [vars(row) for row in Account.history("a", using=alias)]
    archive(alias, to, log=AccountVersion)
    assert Sink(AccountVersion).run(once=True) == 3
    assert [row.version for row in Account.history("a", using=alias)] == [3]
    found = Account.history("a", using=alias, archive=to)
    assert [
        {name: value for name, value in vars(row).items() if name != "_state"} for row in found
    ] == [{name: value for name, value in row.items() if name != "_state"} for row in told]
    assert Account.at("a", version=1, using=alias, archive=to) == told[0]["state"]
    assert Account.at("a", version=3, using=alias, archive="not looked at") == told[2]["state"]
    for version, where in ((1, None), (4, to)):
        with pytest.raises(UnknownEntity, match=f"no version {version}"):
            Account.at("a", version=version, using=alias, archive=where)
    with pytest.raises(ArchiveRefused, match="is no archive"):
        Account.history("a", using=alias, archive=str(tmp_path / "nowhere"))
    assert Account.history("z", using=alias, archive=to) == []
    for name in named(to):
        Path(to, name).unlink()
        Path(to, name).mkdir()
    with pytest.raises(Unreachable, match="The archive cannot be read: "):
        Account.history("a", using=alias, archive=to)


def test_what_has_sunk_is_shown(alias, folder, old):
    positions = old(3)
    archive(alias, folder)
    [status] = sink_status()
    assert (status.log, status.archive, status.days) == (LOG, folder, 3)
    assert status.position == positions[0]
    assert 7 * 86400 <= status.behind_seconds < 7.1 * 86400
    assert status.waits_for == "a process of run_subscriptions or run_outbox; none is running"

    def said(*arguments):
        output = StringIO()
        with contextlib.suppress(SystemExit):
            call_command("outbox_status", *arguments, stdout=output)
        return output.getvalue()

    text = said()
    assert f"{LOG} after 3 d: the oldest 10 d 0 h old, position {positions[0]}, 7 d 0 h" in text
    assert "  waits for: a process of run_subscriptions" in text
    assert "1 log does not sink." in text
    rows = Process.objects.using(alias)
    rows.create(id=uuid4(), resource=f"sink:{LOG}", host="h", pid=1, lease_seconds=600)
    assert sink_status()[0].waits_for == ""
    rows.update(heartbeat_at=DatabaseNow() - timedelta(days=1))  # it was killed
    assert sink_status()[0].waits_for == status.waits_for
    Sink(Event).run(once=True)
    [shown] = json.loads(said("--json"))["sinks"]
    assert shown["position"] is None
    assert shown["behind_seconds"] == 0
    assert f"{LOG} after 3 d: empty" in said()


@pytest.mark.parametrize(
    "value",
    [
        "archive",
        {LOG: "archive"},
        {LOG: ("", 3)},
        {LOG: ("archive", 0)},
        {LOG: ("archive", True)},
        {LOG: ("archive", 3, 4)},
    ],
    ids=str,
)
def test_what_makes_no_sense(settings, value):
    settings.OUTBOX = {**settings.OUTBOX, "SINK": value}
    [found] = check_settings()
    assert found.id == "outbox.E003"
    assert "a dictionary of logs by their tables, each with (archive, days)" in found.msg


def test_a_password_in_the_address_is_not_shown(alias, settings):
    settings.OUTBOX = {**settings.OUTBOX, "SINK": {LOG: ("s3://key:hu/sh@bucket/events", 3)}}
    [status] = sink_status()
    assert status.archive == "s3://key:**@bucket/events"


def test_an_event_from_before_the_clock_was_set_back_has_no_negative_age(alias, settings):
    settings.OUTBOX = {**settings.OUTBOX, "SINK": {LOG: ("archive", 3)}}
    publish_some(alias, 1)
    Event.objects.using(alias).update(recorded_at=DatabaseNow() + timedelta(hours=1))
    [status] = sink_status()
    assert (status.oldest_seconds, status.behind_seconds) == (0, 0)
