"""An archive in a bucket, on a local server that speaks S3: addresses, credentials, a refused PUT.

The server looks whether a file is there, and then writes it, so it cannot show a race.
"""

from __future__ import annotations

import subprocess
import sys
from http.client import HTTPConnection

import pyarrow as pa
import pytest

from outbox_app.exceptions import ArchiveRefused
from outbox_app.models import Event
from outbox_app.pipeline.archive_reader import archive_parts, file_batches
from outbox_app.pipeline.driver.archive_lookup import ArchiveLookup
from outbox_app.pipeline.schema import SCHEMA, arrow_types
from outbox_app.pipeline.table import Archive
from tests.faults.tools import eventually, on
from tests.servers.ports import free_port

from .harness import archive, logged, publish_some, rows_of, source
from .test_compaction import Batches, offset

LOG = "outbox_event"


@pytest.fixture(scope="module")
def server():
    port = free_port()
    command = [sys.executable, "-m", "moto.server", "-p", str(port)]
    silent = subprocess.DEVNULL
    process = subprocess.Popen(command, stdout=silent, stderr=silent)

    def put(path="/bucket"):
        connection = HTTPConnection("127.0.0.1", port, timeout=10)
        try:
            connection.request("PUT", path)
            return connection.getresponse().status == 200
        except OSError:
            return False
        finally:
            connection.close()

    try:
        eventually(put, "a bucket")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def folder(server, monkeypatch, request):
    """An address in a bucket. What it takes to get there is in the environment."""
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
    end, parts = archive_parts(source(alias, archive=folder))
    schema = arrow_types(SCHEMA)
    batches = [
        b for each in parts for b in file_batches(each, schema, source(alias, archive=folder))
    ]
    assert rows_of([pa.Table.from_batches(batches)]) == logged(alias)
    assert Archive.load(folder, LOG).end == end
    rows = list(Event.objects.using(alias).order_by("pk").values_list("pk", "message_id"))
    assert ArchiveLookup(folder, LOG).first([*rows, (ids[-1] + 99, "x")]) == 11


def test_of_two_commits_the_store_refuses_one(folder):
    batches = Batches(folder)
    batches.add(2)
    late = Archive.load(folder, LOG)
    batches.add(2)
    with pytest.raises(ArchiveRefused, match="Another process has written to s3://bucket/"):
        late.commit([], offset(9))
    assert Archive.load(folder, LOG).end == offset(2)


def test_what_is_missing_is_said(folder):
    with pytest.raises(ArchiveRefused, match="is no archive: it is no Delta table"):
        Archive.load(folder, LOG)
    batches = Batches(folder)
    batches.add(2)
    [file] = batches.archive.files()
    batches.archive.store.delete(file.name)
    for use in (batches.archive.verify, lambda: batches.archive.read(file)):
        with pytest.raises(ArchiveRefused, match=f"{file.name} is not there"):
            use()
    batches.archive.store.write("letter.txt", b"dear")
    with pytest.raises(ArchiveRefused, match=r"not empty \(it has 'test_"):
        Archive.make("s3://bucket", LOG, offset(0), arrow_types(SCHEMA))
