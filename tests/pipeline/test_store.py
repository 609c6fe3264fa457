"""A file of a store appears whole or not at all, and one process at a time writes."""

from __future__ import annotations

import errno
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from pyarrow import fs

from outbox_app.exceptions import ArchiveRefused
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
    assert store.list("a") == {"a/b.json": 4}
    store.move("a/b.json", "d/e/f")
    store.delete("c")
    assert store.list() == {"d/e/f": 4}
    for missing in (store.read, store.open, store.delete):
        with pytest.raises(FileNotFoundError):
            missing("a/b.json")


def test_a_path_means_the_same_in_every_process(tmp_path, monkeypatch):
    """Executors have working folders of their own."""
    monkeypatch.chdir(tmp_path)
    store = Store("some/archive")
    assert store.folder == str(tmp_path / "some/archive")
    assert Store("s3://bucket/a/b?region=eu-north-1").folder.startswith("s3://")


@pytest.mark.parametrize("folder", ["nowhere://x", "s3://bucket?colour=red"])
def test_an_address_that_makes_no_sense(folder):
    with pytest.raises(ArchiveRefused, match=r"cannot be opened.*Expected a path"):
        Store(folder)


@pytest.mark.parametrize(
    "address",
    [
        "s3://key:hush@bucket/archive",
        "s3://bucket/archive?region=eu-north-1&secret_key=hush",
        "abfs://container@account.dfs.core.windows.net/archive?account_key=hush",
        "gs://bucket/archive?access_token=hush",
    ],
)
def test_no_password_is_taken(address):
    with pytest.raises(ArchiveRefused, match="holds a password") as refused:
        Store(address)
    assert "hush" not in str(refused.value)


def test_addresses(tmp_path):
    assert Store(tmp_path.as_uri()).is_local
    assert Store(tmp_path.as_uri()).root == str(tmp_path)
    other = Store("s3a://bucket/a/b/?region=eu-north-1")
    assert isinstance(other.system, fs.S3FileSystem)
    assert other.root == "bucket/a/b"
    assert not other.is_local


@pytest.mark.parametrize("failing", ["write", "sync", "move"])
def test_a_write_that_fails_leaves_what_was_there(store, monkeypatch, failing):
    store.write("entry", b"old")
    if failing == "write":

        class Full:
            def __init__(self, stream):
                self.stream = stream

            def __enter__(self):
                return self

            def __exit__(self, *_):
                self.stream.close()

            def write(self, content):
                self.stream.write(content[:2])
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        create = store.create
        monkeypatch.setattr(store, "create", lambda name: Full(create(name)))
    else:

        def fail(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(store, failing, fail)
    with pytest.raises(OSError, match="No space left"):
        store.write("entry", b"new")
    assert Store(store.folder).list() == {"entry": 3}
    assert store.read("entry") == b"old"


def test_a_file_that_is_there_is_not_written_over(store):
    store.create("a").close()
    with pytest.raises(FileExistsError):
        store.create("a")


def test_one_process_writes(store):
    def enter():
        with Store(store.folder).lock():
            return True

    with ThreadPoolExecutor(1) as other:
        with store.lock(), pytest.raises(ArchiveRefused, match="Another process is writing to"):
            other.submit(enter).result()
        assert other.submit(enter).result()
    assert Path(store.root, "_lock").read_bytes() == b""
