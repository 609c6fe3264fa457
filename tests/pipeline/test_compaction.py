"""Small files become large ones, and nobody who reads notices."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

import pyarrow as pa
import pytest

from outbox_app.exceptions import ArchiveRefused
from outbox_app.pipeline import compaction
from outbox_app.pipeline.archive_reader import file_batches
from outbox_app.pipeline.compaction import compact
from outbox_app.pipeline.manifest import Entry, Manifest
from outbox_app.pipeline.offset import Offset
from outbox_app.pipeline.options import Options
from outbox_app.pipeline.parquet import ARROW, write_days
from outbox_app.pipeline.store import Store

from .harness import Killed, archived, entries, killing, leftovers, rows_of, tree

LOG = "outbox_event"


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path / "archive"))


class Batches:
    """Archives batches of made-up events."""

    def __init__(self, store):
        self.store = store
        self.manifest = Manifest.make(store, LOG)
        self.ids = count(1)
        self.rows = []

    def add(self, *sizes):
        for size in sizes:
            rows = [self.row(next(self.ids)) for _ in range(size)]
            table = pa.Table.from_pylist(rows, schema=ARROW)
            self.rows += rows_of([table])
            files = write_days(table.to_batches(), self.store, f"{self.manifest.next:08d}")
            start = self.manifest.end or offset(0)
            verified = 1000.0 + self.manifest.next
            number, end = self.manifest.next, offset(int(start.message_id) + 1)
            self.manifest.commit(Entry(number, number, start, end, files, verified))

    def row(self, id):
        texts = dict.fromkeys(("topic", "stream", "type", "message_id"), f"text {id}")
        numbers = {"id": id, "txid": 0, "version": id, "slice": 1}
        moment = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=id)
        return {**texts, **numbers, "data": "{}", "metadata": "{}", "recorded_at": moment}

    def sizes(self):
        return [entry.rows for entry in Manifest.load(self.store, LOG).entries]

    def assert_whole(self):
        manifest = Manifest.load(self.store, LOG)
        manifest.tidy()
        assert archived(self.store.root) == self.rows
        assert leftovers(self.store.root) == set()
        assert manifest.end == self.manifest.end


def offset(number):
    return Offset(LOG, "db", number, str(number), f'{{"pos": {number}}}')


@pytest.fixture
def batches(store):
    return Batches(store)


def test_many_small_batches_become_one(batches, store):
    batches.add(*[3] * 40)
    old = entries(store.root)
    [merged] = compact(batches.manifest)
    assert (merged.first, merged.last, merged.rows) == (0, 39, 120)
    assert merged.start == offset(0)
    assert merged.end == offset(40)
    assert merged.verified == min(entry["verified"] for entry in old) == 1000.0
    assert len(merged.files) == 6  # days
    assert [entry["last"] for entry in entries(store.root)] == [39]
    batches.assert_whole()
    batches.add(5)
    batches.assert_whole()


def test_few_batches_are_left_alone(batches, store):
    batches.add(*[3] * (compaction.BATCHES - 1))
    before = tree(store.root)
    assert list(compact(batches.manifest)) == []
    assert tree(store.root) == before


def test_young_batches_are_left_alone(batches, monkeypatch):
    """Who reads up to the end of a batch finds that end in the manifest for an hour."""
    batches.add(*[3] * 20)
    # The first was made at 1000, one a second.
    monkeypatch.setattr(compaction.time, "time", lambda: 1015.0 + compaction.SECONDS)
    list(compact(batches.manifest))
    assert batches.sizes() == [48, 3, 3, 3, 3]
    batches.assert_whole()


def test_large_batches_are_left_alone(batches, monkeypatch):
    monkeypatch.setattr(compaction, "ROWS", 40)
    monkeypatch.setattr(compaction, "BATCHES", 3)
    batches.add(3, 3, 30, 4, 4, 4, 21, 9, 9, 9, 9, 9, 9, 9)
    list(compact(batches.manifest))
    assert batches.sizes() == [3, 3, 30, 12, 21, 36, 27]
    batches.assert_whole()


def test_so_are_those_of_large_events(batches, monkeypatch):
    batches.add(4, 4, 4)
    monkeypatch.setattr(compaction, "BATCHES", 2)
    sizes = [sum(file.bytes for file in each.files) for each in batches.manifest.entries]
    monkeypatch.setattr(compaction, "BYTES", 2.5 * max(sizes))
    list(compact(batches.manifest))
    assert batches.sizes() == [8, 4]


def test_batches_without_rows_are_put_together(batches):
    batches.add(*[0] * 20)
    [merged] = compact(batches.manifest)
    assert (merged.rows, merged.last) == (0, 19)
    batches.assert_whole()


def test_a_row_is_not_written_anew_for_ever(batches, monkeypatch):
    written = 0
    original = compaction.write_days

    def write(rows, *arguments):
        nonlocal written
        files = original(rows, *arguments)
        written += sum(file.rows for file in files)
        return files

    monkeypatch.setattr(compaction, "BATCHES", 4)
    monkeypatch.setattr(compaction, "write_days", write)
    for _ in range(150):
        batches.add(1)
        list(compact(batches.manifest))
    assert len(batches.sizes()) < 12
    assert written < 15 * 150  # 3700 if all of it were, each time
    batches.assert_whole()


def test_a_damaged_file_is_not_put_together(batches, store):
    batches.add(*[3] * 20)
    path = Path(store.root, batches.manifest.files()[7].name)
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    before = tree(store.root)
    with pytest.raises(ArchiveRefused, match=f"damaged: {batches.manifest.files()[7].name}"):
        list(compact(batches.manifest))
    assert tree(store.root) == before


def test_what_was_put_together_is_read_before_the_old_goes(batches, store, monkeypatch):
    """As if the disk had swapped two rows."""
    original = compaction.write_days

    def write(rows, *arguments):
        table = pa.Table.from_batches(rows, schema=ARROW)
        twice = table.take([0, *range(1, len(table) - 1), 0])
        return original(twice.to_batches(), *arguments)

    batches.add(*[3] * 20)
    before = entries(store.root)
    monkeypatch.setattr(compaction, "write_days", write)
    with pytest.raises(ArchiveRefused, match="are not what they were made of"):
        list(compact(batches.manifest))
    assert entries(store.root) == before
    batches.assert_whole()


@pytest.mark.parametrize("point", ["compaction_written", "archive_committed"])
def test_killed_while_putting_together(batches, store, point):
    batches.add(*[3] * 20)
    with killing(point):
        list(compact(batches.manifest))
    batches.assert_whole()
    again = Manifest.load(store, LOG)
    assert len(list(compact(again))) == (1 if point == "compaction_written" else 0)
    batches.assert_whole()
    assert batches.sizes() == [60]


@pytest.mark.parametrize("method", ["move", "delete"])
@pytest.mark.parametrize("passed", [0, 1, 2, 7, 19])
def test_killed_in_the_middle_of_it(batches, store, monkeypatch, method, passed):
    batches.add(*[3] * 20)
    left, original = [passed], getattr(store, method)

    def act(*arguments):
        left[0] -= 1
        if left[0] < 0:
            raise Killed
        return original(*arguments)

    monkeypatch.setattr(store, method, act)
    with suppress(Killed):
        list(compact(batches.manifest))
    monkeypatch.undo()
    batches.assert_whole()


def test_who_has_begun_to_read_reads_to_the_end(batches, store):
    """It was planned before, and read after files were put together; or before they were moved."""
    batches.add(*[3] * 20)
    planned = batches.manifest.files()
    list(compact(batches.manifest))
    options = Options(url="sqlite:////x", archive=store.folder)
    read = pa.Table.from_batches(file_batches(planned, ARROW, options))
    assert rows_of([read]) == batches.rows
    with killing("archive_committed"):
        batches.add(4)
    now = Manifest.load(store, LOG).files()
    read = pa.Table.from_batches(file_batches(now, ARROW, options))
    assert rows_of([read]) == batches.rows
    gone = replace(now[0], name=now[0].name.replace("0", "1"))
    with pytest.raises(ArchiveRefused, match="is not there"):
        list(file_batches([gone], ARROW, options))


def test_an_entry_tells_its_checksum(batches, store):
    batches.add(3)
    [entry] = entries(store.root)
    assert json.loads(Path(store.root, "_manifest/00000000-00000000.json").read_text()) == entry
    assert len(entry["sha256"]) == len(entry["files"][0]["sha256"]) == 64
