"""No event is deleted that the archive does not hold as it is in the log: attacks on that promise.

Each attack makes archive and log differ, or lets another session in between the steps of archiver
and pruner. Afterwards the row is still in the log, or was in the archive as it was in the log.
"""

from __future__ import annotations

import re
import sys
from contextlib import suppress
from datetime import timedelta
from io import StringIO
from pathlib import Path
from uuid import uuid4

import pytest
from django.core.management import call_command
from django.db import OperationalError, connections, transaction
from django.db.models import F, QuerySet

from outbox_app.database.clock import DatabaseNow
from outbox_app.entities.maintenance import erase
from outbox_app.events import publish
from outbox_app.events.admin import tables
from outbox_app.events.models import Event
from outbox_app.events.retention import prune_events
from outbox_app.events.sink import Sink, sink_status
from outbox_app.pipeline import parquet
from outbox_app.pipeline.driver import archive_lookup, comparison
from outbox_app.pipeline.driver.archive_lookup import ArchiveLookup
from outbox_app.pipeline.driver.comparison import ArchivedRows
from outbox_app.pipeline.exceptions import ArchiveRefused
from outbox_app.pipeline.table import Archive
from tests import forking
from tests.entities.models import Account, AccountVersion
from tests.events.log.own_log.models import Ledger
from tests.events.log.sessions import Session
from tests.faults.tools import ROOT, on

from .harness import POINTS, archive, archived, killing, logged, named, publish_some

pytestmark = pytest.mark.django_db(transaction=True)

LOG = "outbox_event"


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "archive")


@pytest.fixture
def rows(alias, new_log):
    return Event.objects.using(alias).order_by("pk")


def prune(folder, *arguments, log=LOG):
    output = StringIO()
    given = ("--archived", folder, "--older-than=3", f"--log={log}", *arguments)
    call_command("outbox_prune", *given, stdout=output)
    return output.getvalue()


def positions(rows):
    return list(rows.values_list("pk", flat=True))


CHANGES = {
    "topic": "eu",
    "stream": "order-x",
    "version": 99,
    "type": "other",
    "data": {"n": 3, "x": None},
    "metadata": {"by": "hand"},
    "slice": 1000,
    "message_id": uuid4(),
    "recorded_at": F("recorded_at") + timedelta(microseconds=1),
}


@pytest.mark.parametrize("column", CHANGES)
def test_a_row_that_was_changed_after_it_was_archived_stays(alias, rows, old, folder, column):
    """And all behind it, until it is as it was archived. ``outbox_prune`` says what differs."""
    ids = old(6)
    archive(alias, folder)
    before = rows.values_list(column, flat=True)[3]
    rows.filter(pk=ids[3]).update(**{column: CHANGES[column]})
    for arguments in (["--dry-run"], ["--batch-size=2"], []):
        said = prune(folder, *arguments)
        assert f"position {ids[3]}, which differs from the archived row in {column} (" in said
    assert positions(rows) == ids[3:]
    rows.filter(pk=ids[3]).update(**{column: before})
    assert "held" not in prune(folder)
    assert positions(rows) == []


def test_several_columns_that_differ_are_named_with_digests(alias, rows, old, folder):
    """Values may be personal: their digests are shown, of at most three columns."""
    ids = old(2)
    archive(alias, folder)
    rows.filter(pk=ids[0]).update(**{n: CHANGES[n] for n in ("topic", "type", "slice", "metadata")})
    said = prune(folder)
    digest = r"\w{12}, archived \w{12}"
    pattern = rf"in topic \({digest}\), type \({digest}\), metadata \({digest}\), 1 more$"
    assert [line for line in said.splitlines() if re.search(pattern, line)]
    assert "other" not in said


def test_a_sink_shows_what_differs(alias, rows, old, folder, settings):
    settings.OUTBOX = {**settings.OUTBOX, "SINK": {LOG: (folder, 3)}}
    ids = old(4)
    archive(alias, folder)
    rows.filter(pk=ids[1]).update(type="other")
    sink = Sink(Event, lease_seconds=3600)
    while sink._turn():
        pass
    assert positions(rows) == ids[1:]
    why = f"held by position {ids[1]}, which differs from the archived row in type ("
    [status] = sink_status()
    assert status.waits_for.startswith(why)
    output = StringIO()
    with suppress(SystemExit):  # the log does not sink
        call_command("outbox_status", stdout=output)
    assert f"waits for: {why}" in output.getvalue()
    assert "1 log does not sink." in output.getvalue()
    assert why in str(tables.sinks([status]).groups)
    sink._leave()


def test_a_sink_tells_once_of_columns_that_are_not_compared(
    alias, rows, old, folder, settings, caplog, monkeypatch
):
    settings.OUTBOX = {**settings.OUTBOX, "SINK": {LOG: (folder, 3)}}
    old(2)
    archive(alias, folder)
    table = Archive.load(folder, LOG)
    table.add_columns(table.schema.append(parquet.pa.field("note", parquet.pa.string())))
    monkeypatch.setattr(Sink, "rest", 0.0)
    sink = Sink(Event, lease_seconds=3600)
    for _ in range(6):
        sink._turn()
    sink._leave()
    assert positions(rows) == []
    said = [each.getMessage() for each in caplog.records if "not compared" in each.msg]
    assert said == [
        f"Columns are not compared with the archive log={LOG} "
        'columns="note, which the log has no more"'
    ]
    assert f'not compared log={LOG} columns="note, which the log has no more"' in prune(folder)


def test_the_transaction_of_a_row_is_no_difference(alias, rows, old, folder):
    """``outbox_rebase`` gives all rows another one."""
    old(4)
    archive(alias, folder)
    rows.update(txid=7)
    prune(folder)
    assert positions(rows) == []


def test_an_erased_version_sinks(alias, folder):
    """Its archived row has its content: an erasure does not reach archives."""
    for n, command in enumerate(["open", "date"]):
        Account.execute("a", command, {"owner": "x"} if n == 0 else {}, command_id=f"c{n}",
                        using=alias)  # fmt: skip
    versions = QuerySet(AccountVersion, using=alias).order_by("pk")
    versions.update(recorded_at=DatabaseNow() - timedelta(days=9))
    archive(alias, folder, log=AccountVersion)
    erase(Account, "a", reason="asked", using=alias)
    table = AccountVersion._meta.db_table
    versions.filter(version=1).update(command="other")
    assert "in command (" in prune(folder, log=table)
    assert versions.count() == 3
    versions.filter(version=1).update(command="open")
    prune(folder, log=table)
    assert [row.version for row in versions] == [3]


def test_a_row_that_only_looks_erased_stays(alias, rows, old, folder):
    ids = old(3)
    archive(alias, folder)
    rows.filter(pk=ids[0]).update(data={}, metadata={"by": "erased"})
    rows.filter(pk=ids[1]).update(data={"n": 9}, metadata={"erased": {}})
    prune(folder)
    assert positions(rows) == ids
    rows.filter(pk=ids[0]).update(data={}, metadata={"erased": {}})
    prune(folder)
    assert positions(rows) == ids[1:]


def test_what_commits_late_stays_until_it_is_archived(alias, rows, old, folder):
    if connections[alias].vendor == "sqlite":
        pytest.skip("SQLite has one writer at a time")
    ids = old(2)
    with Session(alias) as late:
        [missing] = late.begin().publish("late")
        ids += old(2)
        archive(alias, folder)
        prune(folder)
        late.commit()
    rows.update(recorded_at=DatabaseNow() - timedelta(days=9))
    assert positions(rows) == [missing]
    assert f"position {missing}, which is not archived" in prune(folder)
    archive(alias, folder)
    prune(folder)
    assert positions(rows) == []
    assert len(archived(folder)) == 5


def test_a_log_that_was_set_back_gives_no_event_away(alias, rows, old, folder):
    """As after a restore: the positions are given to other events, with the same content."""
    ids = old(4)
    archive(alias, folder)
    kept = list(rows.values())
    rows.delete()
    rows.bulk_create(Event(**{**each, "message_id": uuid4()}) for each in kept)
    assert f"position {ids[0]}, which differs from the archived row in message_id" in prune(folder)
    assert positions(rows) == ids


def test_a_row_that_is_archived_twice_has_to_be_right_once(alias, rows, old, folder):
    ids = old(4)
    archive(alias, folder)
    table = Archive.load(folder, LOG)
    [first, *_] = table.files()
    made = table.read(first).to_pylist()
    made[0]["type"] = "other"
    batch = parquet.pa.Table.from_pylist(made, schema=table.schema).to_batches()
    table.commit(parquet.write_days(batch, table.store, "00000009-twice", table.schema), table.end)
    prune(folder)
    assert positions(rows) == []
    assert len(ids) == 4


@on("default")
def test_a_file_that_was_replaced_is_no_reason_to_delete(alias, rows, old, folder, tmp_path):
    """By a file of another log, or by one with the same rows."""
    ids = old(4)
    archive(alias, folder)
    for n in range(4):
        with transaction.atomic(using=alias):
            publish(f"order-{n}", "placed", {}, log=Ledger, using=alias)
    archive(alias, tmp_path / "other", log=Ledger)
    [name] = named(folder)
    path, intact = Path(folder, name), Path(folder, name).read_bytes()
    [other] = named(tmp_path / "other")
    rewritten = tmp_path / "rewritten.parquet"
    parquet.parquet.write_table(parquet.parquet.read_table(path, partitioning=None), rewritten)
    for content in (Path(tmp_path, "other", other).read_bytes(), rewritten.read_bytes(), b""):
        path.write_bytes(content)
        with pytest.raises(ArchiveRefused, match="or not as it was written"):
            prune_events(archive=folder, older_than=3)
    path.unlink()
    with pytest.raises(ArchiveRefused, match="is missing"):
        prune_events(archive=folder, older_than=3)
    assert positions(rows) == ids
    path.write_bytes(intact)
    assert prune_events(archive=folder, older_than=3) == 4


@on("default")
def test_an_archive_of_other_rows_with_the_same_positions(alias, rows, old, folder, tmp_path):
    """Its commits and files are whole, but another archive was put in its place."""
    ids = old(4)
    rows.update(topic="another shop")
    archive(alias, folder)
    rows.update(topic="")
    assert "differs from the archived row in topic" in prune(folder)
    assert positions(rows) == ids


@on("postgres", "mariadb")
def test_a_row_cannot_change_between_its_comparison_and_its_removal(alias, rows, old, folder, at):
    ids = old(3)
    archive(alias, folder)
    refused = []

    def change():
        with Session(alias) as other:
            wait = "SET lock_timeout = '100ms'" if alias == "postgres" else None
            other.sql(wait or "SET SESSION innodb_lock_wait_timeout = 1")
            try:
                other.do(lambda: rows.filter(pk=ids[1]).update(type="other"))
            except OperationalError as error:
                refused.append(error)

    at("prune_compared", change)
    prune(folder)
    assert len(refused) == 1
    assert positions(rows) == []
    assert [row[5] for row in archived(folder)] == ["placed"] * 3


@on("postgres", "mariadb")
def test_what_another_pruner_has_removed_meanwhile_holds_nothing(
    alias, rows, old, folder, monkeypatch
):
    old(5)
    archive(alias, folder)
    young = old(2)
    first = ArchiveLookup.first

    def beaten(self, ids, **options):
        monkeypatch.setattr(ArchiveLookup, "first", first)
        with Session(alias) as other:
            other.do(lambda: prune(folder, "--batch-size=3"))
        return first(self, ids, **options)

    monkeypatch.setattr(ArchiveLookup, "first", beaten)
    said = prune(folder, "--batch-size=2")
    assert said.count("held") == 1
    assert f"position {young[0]}, which is not archived" in said
    assert positions(rows) == young


@on("postgres")
def test_rows_that_a_policy_hides_from_who_locks_them_stay(alias, rows, old, folder):
    """A policy for SELECT and DELETE only: the pruner ends, and says why."""
    ids = old(3)
    archive(alias, folder)
    with Session(alias) as owner, connections[alias].cursor() as cursor:
        owner.sql("CREATE ROLE pruner")
        try:
            owner.sql("GRANT ALL ON ALL TABLES IN SCHEMA public TO pruner")
            owner.sql("ALTER TABLE outbox_event ENABLE ROW LEVEL SECURITY")
            for right in ("SELECT", "DELETE"):
                owner.sql(f"CREATE POLICY {right}_all ON outbox_event FOR {right} USING (true)")
            cursor.execute("SET ROLE pruner")
            said = prune(folder, "--batch-size=2")
            cursor.execute("RESET ROLE")
            assert f"position {ids[0]}, which this user cannot lock: row-level" in said
            assert positions(rows) == ids
            owner.sql("CREATE POLICY update_all ON outbox_event FOR UPDATE USING (true)")
            cursor.execute("SET ROLE pruner")
            prune(folder, "--batch-size=2")
        finally:
            cursor.execute("RESET ROLE")
            for right in ("SELECT", "DELETE", "UPDATE"):
                owner.sql(f"DROP POLICY IF EXISTS {right}_all ON outbox_event")
            owner.sql("ALTER TABLE outbox_event DISABLE ROW LEVEL SECURITY")
            owner.sql("DROP OWNED BY pruner")
            owner.sql("DROP ROLE pruner")
    assert positions(rows) == []


@on("postgres", "mariadb")
def test_a_dry_run_locks_no_row(alias, rows, old, folder, at):
    ids = old(3)
    archive(alias, folder)

    def change():
        with Session(alias) as other:
            other.do(lambda: rows.filter(pk=ids[1]).update(type="other"))

    at("prune_compared", change)
    prune(folder, "--dry-run")
    assert list(rows.filter(type="other").values_list("pk", flat=True)) == [ids[1]]


@pytest.mark.parametrize("point", ["prune_compared", "prune_removed"])
def test_a_pruner_is_killed(alias, rows, old, folder, point, environment):
    """In the second of three batches. The next one goes on; nothing is lost."""
    old(6)
    archive(alias, folder)
    whole = archived(folder)
    command = ["outbox_prune", "--archived", folder, "--older-than=3", "--batch-size=2"]
    done = forking.run(
        [sys.executable, "-m", "django", *command, f"--database={alias}"],
        cwd=ROOT,
        env={**environment(alias), "OUTBOX_FAILPOINT": f"{point}=kill@2"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -9, done.stderr
    assert logged(alias) == whole[2:]
    prune(folder)
    assert positions(rows) == []
    assert archived(folder) == whole


@on("default", "postgres")
@pytest.mark.parametrize("point", POINTS)
def test_a_prune_beside_an_archiver_that_is_killed(alias, rows, old, folder, point, monkeypatch):
    """Whatever the archiver has reached, only what it has committed goes."""
    monkeypatch.setattr("outbox_app.pipeline.compaction.FILES", 2)
    old(10)
    whole = logged(alias)
    with killing(point, 2):
        archive(alias, folder)
    prune(folder)
    assert sorted({*archived(folder), *logged(alias)}) == whole
    archive(alias, folder)
    prune(folder)
    assert positions(rows) == []
    assert archived(folder) == whole


@on("default", "postgres")
@pytest.mark.parametrize("point", [each for each in POINTS if each != "compaction_written"])
def test_a_prune_in_the_middle_of_a_batch(alias, rows, old, folder, point, at):
    """It removes rows of earlier batches only, so the batch that is made misses none."""
    old(10)
    whole = logged(alias)
    at("archive_done", lambda: at(point, lambda: prune(folder)))
    archive(alias, folder)
    assert archived(folder) == whole
    prune(folder)
    assert positions(rows) == []


@on("default", "postgres")
def test_an_archiver_in_the_middle_of_a_prune(alias, rows, old, folder, at):
    old(6)
    archive(alias, folder)
    young = publish_some(alias, 3)
    whole = logged(alias)

    def archive_more():
        with Session(alias) as other:  # with a connection of its own
            other.do(lambda: archive(alias, folder))

    at("prune_compared", archive_more)
    prune(folder, "--batch-size=2")
    assert positions(rows) == young
    assert archived(folder) == whole


@on("default")
def test_memory_is_bounded(alias, rows, old, folder, monkeypatch):
    """Of a file, the parts are decoded that have wanted rows, once each, and few are kept."""
    monkeypatch.setattr(parquet, "ROW_GROUP", 10)
    monkeypatch.setattr(comparison, "MEMORY", 1)
    monkeypatch.setattr(archive_lookup, "ROWS", 5)
    monkeypatch.setattr(archive_lookup, "MOST", 5)
    ids = old(100)
    archive(alias, folder, rows=50)
    reading, read, kept = ArchivedRows._read, [], []

    def spied(self, file, number, columns=None):
        if (file.name, number, columns is None) not in self._kept:
            read.append((file.first, number, columns is None))
        found = reading(self, file, number, columns)
        kept.append(len(self._kept))
        return found

    monkeypatch.setattr(ArchivedRows, "_read", spied)
    lookup = ArchiveLookup(folder, Event, using=alias)
    assert lookup.first(ids[30:60], lock=False) == (30, "")
    assert max(kept) == 1
    assert {each[:2] for each in read} == {(ids[0], 3), (ids[0], 4), (ids[50], 0)}
    monkeypatch.setattr(comparison, "MEMORY", 10**9)
    read.clear()
    assert ArchiveLookup(folder, Event, using=alias).first(ids, lock=False) == (100, "")
    assert len(read) == len(set(read)) == 20


def test_of_a_long_log_every_row_is_compared(alias, rows, old, folder, monkeypatch):
    """Also at the ends of what is read and compared at once."""
    monkeypatch.setattr(archive_lookup, "ROWS", 3)
    monkeypatch.setattr(archive_lookup, "MOST", 3)
    ids = old(8)
    archive(alias, folder)
    for n, id in enumerate(ids):
        kind = rows.filter(pk=id)
        kind.update(type="other")
        lookup = ArchiveLookup(folder, Event, using=alias)
        assert lookup.first(ids, lock=False)[0] == n
        assert lookup.first(ids[n:], lock=False)[0] == 0
        kind.update(type="placed")
    assert ArchiveLookup(folder, Event, using=alias).first([], lock=False) == (0, "")


@on("default")
def test_few_large_rows_are_read_at_once(alias, rows, old, folder, monkeypatch):
    monkeypatch.setattr(archive_lookup, "ROWS", 4)
    monkeypatch.setattr(archive_lookup, "BYTES", 250_000)
    ids = old(40)
    rows.filter(pk__gt=ids[19]).update(data={"text": "x" * 100_000})
    archive(alias, folder)
    lookup, read = ArchiveLookup(folder, Event, using=alias), []
    original = lookup._logged

    def logged(ids, *arguments, **options):
        read.append(len(ids))
        return original(ids, *arguments, **options)

    lookup._logged = logged
    assert [lookup.first(ids[n : n + 10], lock=False) for n in range(0, 40, 10)] == [(10, "")] * 4
    assert read == [4, 6, 10, 10, *[2] * 5]
