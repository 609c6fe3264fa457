"""A file of a store appears whole or not at all, and its address contains no secret."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
from deltalake.exceptions import DeltaError
from pyarrow import fs

from outbox_app.pipeline.exceptions import ArchiveRefused, Unreachable
from outbox_app.pipeline.store import Store


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path / "archive"))


def test_what_is_written_is_there(store):
    assert store.list() == {}
    store.write("a/b.json", b"one")
    store.write("a/b.json", b"two!")
    store.write("c", b"")
    assert store.read("a/b.json") == b"two!"
    assert store.list() == {"a/b.json": 4, "c": 0}
    store.delete("c")
    assert store.list() == {"a/b.json": 4}
    for missing in (store.read, store.open, store.delete, store.sync):
        with pytest.raises(FileNotFoundError):
            missing("c")


def test_what_is_written_is_on_disk_before_it_has_its_name_and_then_with_its_name(
    store, monkeypatch
):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda number: synced.append(os.fstat(number).st_ino))
    store.write("a/b.json", b"one")
    there = [Path(store.folder, name) for name in ("a/b.json", "a/b.json", "a", "")]
    assert synced == [path.stat().st_ino for path in there]


def test_a_path_means_the_same_in_every_process(tmp_path, monkeypatch):
    """Executors have working folders of their own."""
    monkeypatch.chdir(tmp_path)
    opened = SimpleNamespace(from_uri=lambda folder: (None, "bucket/a/b"))
    monkeypatch.setattr("pyarrow.fs.FileSystem", opened)
    assert Store("some/archive").folder == str(tmp_path / "some/archive")
    assert Store("s3://bucket/a/b/").folder == "s3://bucket/a/b"
    assert Store(f"{tmp_path.as_uri()}/my%20archive/").folder == str(tmp_path / "my archive")


@pytest.mark.parametrize("folder", ["nowhere://x", "no+where://x/y", "s3://", "s3:/x", "gs:///x"])
def test_an_address_that_makes_no_sense(folder):
    with pytest.raises(ArchiveRefused, match=r"cannot be opened.*Expected a path"):
        Store(folder)


@pytest.mark.parametrize("name", ["a#b", "a?b", "a%41b", "a\\b", "a\nb", "file:///a%23b"])
def test_a_path_that_delta_does_not_take_as_it_is(name):
    """Its table would be in another folder, and the archive called damaged."""
    with pytest.raises(ArchiveRefused, match="cannot hold an archive"):
        Store(name)
    Store("/srv/100% of it, ä'b")


@pytest.mark.parametrize(
    "address",
    [
        "s3://key:hush@bucket/archive",
        "s3://key:hu/hush+sh@bucket/archive",  # about half of AWS' keys have a slash
        "s3://bucket/archive?region=eu-north-1&secret_key=hush",
        "abfs://container@account.dfs.core.windows.net/archive?account_key=hush",
        "gs://bucket/archive?access_token=hush",
    ],
)
def test_no_password_is_taken(address):
    with pytest.raises(ArchiveRefused, match="holds a password") as refused:
        Store(address)
    assert "hush" not in str(refused.value)


@pytest.mark.parametrize(
    "said", ["Error performing list request", "Error getting list response body ↳ HTTP error"]
)
def test_a_request_that_failed_or_whose_answer_was_cut_off_is_no_damage(said, monkeypatch):
    """As delta-rs says it where it has read a table before, and looks for newer versions."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")  # the region is not asked for
    said = f"Error interacting with object store ↳ Generic S3 error ↳ {said} ↳ request or …"
    with pytest.raises(Unreachable, match="Access to s3:"):
        Store("s3://bucket/archive").require_reached(DeltaError(said))


def test_a_bucket_whose_region_cannot_be_asked_for_is_unreachable(monkeypatch):
    """It has none in the environment. An archiver that follows tries again, later."""
    said = "When resolving region for bucket 'b': AWS Error NETWORK_CONNECTION during HeadBucket"

    def away(*_):
        raise OSError(said)

    systems = SimpleNamespace(
        LocalFileSystem=fs.LocalFileSystem, FileSystem=SimpleNamespace(from_uri=away)
    )
    monkeypatch.setattr("outbox_app.pipeline.store.fs", systems)
    with pytest.raises(Unreachable, match="Access to s3://b/archive failed: When"):
        Store("s3://b/archive")


@pytest.mark.parametrize("failing", ["fsync", "replace"])
def test_a_write_that_fails_leaves_what_was_there(store, monkeypatch, failing):
    store.write("entry", b"old")

    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, failing, fail)
    with pytest.raises(OSError, match="No space left"):
        store.write("entry", b"new")
    monkeypatch.undo()
    assert Store(store.folder).list() == {"entry": 3}
    assert store.read("entry") == b"old"


@pytest.mark.parametrize("name", ["../x", "../archive-2/x", "link/x", "link"])
def test_nothing_is_read_or_written_elsewhere(store, tmp_path, name):
    Path(store.folder).mkdir()
    Path(store.folder, "link").symlink_to(tmp_path)
    for use in (store.read, store.delete, store.sync, lambda name: store.write(name, b"")):
        with pytest.raises(ArchiveRefused, match="leads out of it"):
            use(name)
