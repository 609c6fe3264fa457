"""An archive in a bucket, on a local server that speaks S3: addresses, a refused PUT, credentials
that are wrong or expire in the middle.

The server checks for a file before it writes it, not atomically, so it cannot show a race.
"""

from __future__ import annotations

import subprocess
import sys
from datetime import UTC, datetime
from http.client import HTTPConnection

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from deltalake.exceptions import CommitFailedError

from outbox_app.events import prune_events
from outbox_app.events.models import Event
from outbox_app.pipeline import compaction
from outbox_app.pipeline.archive_reader import file_batches, planned
from outbox_app.pipeline.compaction import compact
from outbox_app.pipeline.driver.archive_lookup import ArchiveLookup
from outbox_app.pipeline.exceptions import ArchiveRefused, Unreachable
from outbox_app.pipeline.schema import SCHEMA, arrow_types
from outbox_app.pipeline.table import Archive
from tests.faults.tools import eventually, on
from tests.servers.ports import free_port

from .harness import POINTS, archive, logged, publish_some, rows_of, source
from .test_compaction import Batches, offset

LOG = "outbox_event"


@pytest.fixture(scope="module")
def server():
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    silent = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=silent, stderr=silent)

    try:
        eventually(lambda: ask(port, "PUT", "/bucket"), "a bucket")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def ask(port, method, path, body=None):
    connection = HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request(method, path, body)
        return connection.getresponse().status == 200
    except OSError:
        return False
    finally:
        connection.close()


@pytest.fixture
def credentials(server):
    """``credentials(valid)``: make the environment's credentials valid or invalid from now on."""

    def make(valid):
        port = int(server.rpartition(":")[2])
        assert ask(port, "POST", "/moto-api/reset-auth", str(10**9 if valid else 0))

    yield make
    make(True)


@pytest.fixture
def folder(server, monkeypatch, request):
    """An address in a bucket. The environment has the endpoint and the credentials."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", server)
    monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
    monkeypatch.setenv("AWS_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "key")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hush")
    return f"s3://bucket/{request.node.originalname}"


@pytest.mark.django_db(transaction=True)
@on("default")
def test_a_log_is_archived_into_a_bucket(alias, new_log, folder):
    ids = publish_some(alias, 9)
    assert archive(alias, folder) == 9
    publish_some(alias, 2)
    assert archive(alias, folder) == 2
    options, schema = source(alias, archive=folder), arrow_types(SCHEMA)
    plan = planned(options)
    batches = [b for part in plan.parts for b in file_batches(part.files, schema, options)]
    assert rows_of([pa.Table.from_batches(batches)]) == logged(alias)
    assert Archive.load(folder, LOG).end == plan.archive.end
    assert ids == [row[0] for row in logged(alias)][:9]
    rows = [row[0] for row in logged(alias)] + publish_some(alias, 1)
    lookup = ArchiveLookup(folder, Event, using=alias)
    assert lookup.first(rows, lock=False) == (11, "is not archived")


def test_of_two_commits_the_store_refuses_one(folder):
    batches = Batches(folder)
    batches.add(2)
    late = Archive.load(folder, LOG)
    batches.add(2)
    with pytest.raises(ArchiveRefused, match="Another process has written to s3://bucket/"):
        late.commit([], offset(9))
    assert Archive.load(folder, LOG).end == offset(2)


@pytest.mark.parametrize("step", ["batch", "compaction", "column"])
def test_a_commit_that_was_sent_twice_has_happened(folder, monkeypatch, step):
    """A gateway answers 504 when the store has committed, and delta-rs sends the same again."""
    monkeypatch.setattr(compaction, "FILES", 3)
    batches = Batches(folder := f"{folder}/{step}")
    batches.add(2, 2, 2)
    archive, sent = batches.archive, []

    def refused(send):
        def twice(*arguments, **given):
            send(*arguments, **given)
            sent.append(arguments)
            raise CommitFailedError("a version that is there already")

        return twice

    alter = type(archive._table.alter)
    monkeypatch.setattr(alter, "add_columns", refused(alter.add_columns))
    write = DeltaTable.create_write_transaction
    monkeypatch.setattr(DeltaTable, "create_write_transaction", refused(write))
    if step == "batch":
        batches.add(3)
    elif step == "compaction":
        assert [file.rows for file in compact(archive)] == [6]
    else:
        archive.add_columns(archive.schema.append(pa.field("shop", pa.string())))
    assert len(sent) == 1
    again = Archive.load(folder, LOG)
    assert (again.files(), again.mark) == (archive.files(), archive.mark)
    assert sum(file.rows for file in again.files()) == again.rows == len(batches.rows)
    assert ("shop" in again.schema.names) == (step == "column")


def test_what_is_missing_is_said(folder):
    with pytest.raises(ArchiveRefused, match="is no archive: it is no Delta table"):
        Archive.load(folder, LOG)
    batches = Batches(folder)
    batches.add(2)
    [file] = batches.archive.files()
    batches.archive.store.delete(file.name)
    for use in (lambda: batches.archive.verify(bool), lambda: batches.archive.read(file)):
        with pytest.raises(ArchiveRefused, match=f"{file.name} is missing"):
            use()
    batches.archive.store.write("letter.txt", b"dear")
    with pytest.raises(ArchiveRefused, match=r"not empty \(it has 'test_"):
        Archive.make("s3://bucket", LOG, offset(0), arrow_types(SCHEMA))


def refused(use):
    """The store refuses, which is said in one line, and is no damage of the archive."""
    with pytest.raises(Unreachable, match=r"Access to s3://bucket/.* failed") as error:
        use()
    said = str(error.value)
    code = ("INVALID_ACCESS_KEY_ID", "ACCESS_DENIED", "access key id you provided does not exist")
    assert any(each.lower() in said.lower() for each in code)
    assert "needs valid credentials" in said
    assert "\n" not in said
    assert "\x1b" not in said


@pytest.mark.django_db(transaction=True)
@on("default")
def test_credentials_are_wrong(alias, new_log, folder, credentials):
    """Nothing is archived, read or pruned; with valid ones it goes on."""
    ids = publish_some(alias, 9)
    Event.objects.using(alias).update(recorded_at=datetime(2020, 1, 1, tzinfo=UTC))
    credentials(False)
    refused(lambda: archive(alias, folder))
    credentials(True)
    assert archive(alias, folder) == 9
    known = Archive.load(folder, LOG)
    options = source(alias, archive=folder)

    def prune():
        return prune_events(using=alias, log=LOG, older_than=1, archive=folder)

    credentials(False)
    for use in (
        prune,
        known.refresh,
        lambda: known.verify(bool),
        known.vacuum,
        lambda: archive(alias, folder),
        lambda: planned(options),
        lambda: list(file_batches(known.files(), arrow_types(SCHEMA), options)),
        lambda: ArchiveLookup(folder, Event, using=alias),
        lambda: known.store.write("x", b"x"),
        lambda: known.store.delete(known.files()[0].name),
    ):
        refused(use)
    assert [row[0] for row in logged(alias)] == ids
    credentials(True)
    assert prune() == 9


@pytest.mark.django_db(transaction=True)
@on("default")
@pytest.mark.parametrize("point", POINTS[:4])
def test_credentials_expire_in_the_middle(alias, new_log, folder, credentials, at, point):
    """At each point of a batch: what is committed counts, and the next run makes the rest."""
    folder += f"-{point}"
    publish_some(alias, 9)
    at("archive_done", lambda: at(point, lambda: credentials(False)))  # in the second batch
    refused(lambda: archive(alias, folder))
    assert len(logged(alias)) == 9
    credentials(True)
    so_far = Archive.load(folder, LOG)
    assert so_far.mark.batches == (2 if point == "archive_committed" else 1)
    assert archive(alias, folder) == 9 - so_far.rows
    whole = Archive.load(folder, LOG)
    assert rows_of(whole.read(file) for file in whole.files()) == logged(alias)


@pytest.mark.django_db(transaction=True)
@on("default")
def test_credentials_expire_while_events_are_pruned(
    alias, new_log, folder, credentials, monkeypatch
):
    """What has been looked up is removed, and nothing else."""
    ids = publish_some(alias, 9)
    Event.objects.using(alias).update(recorded_at=datetime(2020, 1, 1, tzinfo=UTC))
    archive(alias, folder)
    look, looks = ArchiveLookup.first, []

    def first(self, ids, **options):
        looks.append(ids)
        credentials(len(looks) != 2)
        return look(self, ids, **options)

    def prune():
        return prune_events(using=alias, log=LOG, older_than=1, batch_size=4, archive=folder)

    monkeypatch.setattr(ArchiveLookup, "first", first)
    with pytest.raises(Unreachable, match="4 rows of outbox_event were removed, then: Access to"):
        prune()
    assert [row[0] for row in logged(alias)] == ids[4:]
    credentials(True)
    assert prune() == 5
