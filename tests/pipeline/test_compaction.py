"""Small files become large ones, and no reader notices."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable
from pyarrow import parquet

from outbox_app.events.log.filter import EventFilter
from outbox_app.pipeline import compaction
from outbox_app.pipeline.archive_reader import file_batches
from outbox_app.pipeline.compaction import compact
from outbox_app.pipeline.exceptions import ArchiveRefused
from outbox_app.pipeline.offset import Offset
from outbox_app.pipeline.options import Options
from outbox_app.pipeline.parquet import write_days
from outbox_app.pipeline.schema import SCHEMA, arrow_types
from outbox_app.pipeline.store import Store
from outbox_app.pipeline.table import Archive

from .harness import age, archived, commits, killing, leftovers, named, rows_of, tree

LOG = "outbox_event"
ARROW = arrow_types(SCHEMA)


class Batches:
    """Archives batches of made-up events, so many hours apart."""

    def __init__(self, folder):
        self.folder, self.hours = folder, 0
        self.archive = Archive.make(folder, LOG, offset(0), ARROW)
        self.ids = count(1)
        self.rows = []

    def add(self, *sizes):
        for size in sizes:
            rows = [self.row(next(self.ids)) for _ in range(size)]
            table = pa.Table.from_pylist(rows, schema=ARROW)
            self.rows += rows_of([table])
            prefix = f"{self.archive.mark.batches:08d}-made"
            files = write_days(table.to_batches(), self.archive.store, prefix, ARROW)
            self.archive.commit(files, offset(self.archive.mark.batches + 1))

    def row(self, id):
        texts = dict.fromkeys(("topic", "stream", "type", "message_id"), f"text {id}")
        numbers = {"id": id, "txid": 0, "version": id, "slice": 1}
        moment = datetime(2026, 1, 1, tzinfo=UTC) + timedelta(hours=id * self.hours)
        return {**texts, **numbers, "data": "{}", "metadata": "{}", "recorded_at": moment}

    def sizes(self):
        return [file.rows for file in Archive.load(self.folder, LOG).files()]

    def assert_whole(self):
        archive = Archive.load(self.folder, LOG)
        assert archived(self.folder) == self.rows
        assert archive.rows == len(self.rows)
        assert archive.end == self.archive.end
        assert archive.mark.batches == self.archive.mark.batches


def offset(number):
    return Offset(LOG, "db", number, str(number), f'{{"pos": {number}}}')


@pytest.fixture
def batches(tmp_path):
    return Batches(str(tmp_path / "archive"))


@pytest.mark.slow
def test_many_small_files_become_one(batches):
    batches.add(*[3] * 40)
    [merged] = compact(batches.archive)
    assert (merged.first, merged.last, merged.rows) == (1, 120, 120)
    assert batches.sizes() == [120]
    batches.assert_whole()
    batches.add(5)
    batches.assert_whole()
    assert leftovers(batches.folder) == set()


@pytest.mark.slow
def test_files_of_other_days_are_not_put_together(batches):
    batches.add(*[2] * 20)
    batches.hours = 24
    batches.add(*[1] * 20)
    [merged] = compact(batches.archive)
    assert (merged.day, merged.rows) == ("2026-01-01", 40)
    assert sorted(batches.sizes()) == [1] * 20 + [40]
    batches.assert_whole()


def test_what_was_put_together_is_nothing_new(batches):
    """Who streams the table is not given its rows twice."""
    batches.add(*[3] * 20)
    list(compact(batches.archive))
    *added, merged = (
        [each.get("add") or each["remove"] for each in actions if {"add", "remove"} & each.keys()]
        for actions in commits(batches.folder)
    )
    assert [[each["dataChange"] for each in actions] for actions in added[1:]] == [[True]] * 20
    assert [each["dataChange"] for each in merged] == [False] * 21


def test_a_commit_is_on_disk_before_the_next(batches, monkeypatch):
    """The process that has written it may have been killed before."""
    synced = []
    monkeypatch.setattr(Store, "sync", lambda self, name: synced.append(name))
    batches.add(3)
    Archive.load(batches.folder, LOG)
    batches.archive.add_columns(pa.schema([*ARROW, pa.field("note", pa.string())]))
    log = [name for name in synced if name.startswith("_delta_log/")]
    assert log == [f"_delta_log/{version:020d}.json" for version in (1, 1, 2)]
    last = [each for actions in commits(batches.folder)[1:] for each in actions]
    said = [each["commitInfo"]["outbox"] for each in last if "commitInfo" in each]
    assert said[0] == said[1]  # so that the last commit is enough


def test_few_files_are_left_alone(batches):
    batches.add(*[3] * (compaction.FILES - 1))
    before = tree(batches.folder)
    assert list(compact(batches.archive)) == []
    assert tree(batches.folder) == before


def test_large_files_are_left_alone(batches, monkeypatch):
    monkeypatch.setattr(compaction, "ROWS", 40)
    monkeypatch.setattr(compaction, "FILES", 3)
    batches.add(3, 3, 30, 4, 4, 4, 21, 9, 9, 9, 9, 9, 9, 9)
    list(compact(batches.archive))
    assert batches.sizes() == [3, 3, 30, 12, 21, 36, 27]
    batches.assert_whole()


def test_so_are_those_of_large_events(batches, monkeypatch):
    batches.add(4, 4, 4)
    monkeypatch.setattr(compaction, "FILES", 2)
    sizes = [file.bytes for file in batches.archive.files()]
    monkeypatch.setattr(compaction, "BYTES", 2.5 * max(sizes))
    list(compact(batches.archive))
    assert batches.sizes() == [8, 4]


@pytest.mark.slow
def test_a_row_is_not_written_anew_for_ever(batches, monkeypatch):
    written = 0
    original = compaction.write_days

    def write(rows, *arguments):
        nonlocal written
        files = original(rows, *arguments)
        written += sum(file.rows for file in files)
        return files

    monkeypatch.setattr(compaction, "FILES", 4)
    monkeypatch.setattr(compaction, "write_days", write)
    for _ in range(150):
        batches.add(1)
        list(compact(batches.archive))
    assert len(batches.sizes()) < 12
    assert written < 15 * 150  # 3700 if all of it were, each time
    batches.assert_whole()


def test_a_damaged_file_is_not_put_together(batches):
    batches.add(*[3] * 20)
    path = Path(batches.folder, batches.archive.files()[7].name)
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    before = tree(batches.folder)
    with pytest.raises(ArchiveRefused, match=f"damaged: {batches.archive.files()[7].name}"):
        list(compact(batches.archive))
    assert tree(batches.folder) == before


def test_what_was_put_together_is_read_before_the_old_goes(batches, monkeypatch):
    """As if the disk had swapped two rows."""
    original = compaction.write_days

    def write(rows, *arguments):
        table = pa.Table.from_batches(rows, schema=ARROW)
        twice = table.take([0, *range(1, len(table) - 1), 0])
        return original(twice.to_batches(), *arguments)

    batches.add(*[3] * 20)
    before = commits(batches.folder)
    monkeypatch.setattr(compaction, "write_days", write)
    with pytest.raises(ArchiveRefused, match="differ from the files that they were made of"):
        list(compact(batches.archive))
    assert commits(batches.folder) == before
    batches.assert_whole()


@pytest.mark.parametrize("point", ["compaction_written", "archive_committed"])
def test_killed_while_putting_together(batches, point):
    batches.add(*[3] * 20)
    with killing(point):
        list(compact(batches.archive))
    batches.assert_whole()
    again = Archive.load(batches.folder, LOG)
    again.verify(lambda position: False)  # no row of what is left has to be in the log still
    assert len(list(compact(again))) == (1 if point == "compaction_written" else 0)
    batches.assert_whole()
    assert batches.sizes() == [60]


def test_who_has_begun_to_read_reads_to_the_end(batches):
    """It was planned before, and read after files were put together; a week later they go."""
    batches.add(*[3] * 20)
    planned = batches.archive.files()
    list(compact(batches.archive))
    batches.archive.vacuum()
    options = Options(url="sqlite:////x", archive=batches.folder)
    read = pa.Table.from_batches(file_batches(planned, ARROW, options))
    assert rows_of([read]) == batches.rows
    only = EventFilter(topics=["text 3", "text 5"], types=["text 5", "text 6*"])
    [some] = file_batches(planned, arrow_types("id bigint"), options, only)
    assert some.to_pylist() == [{"id": 5}]
    gone = replace(planned[0], name=planned[0].name.replace("-0", "-1"))
    with pytest.raises(ArchiveRefused, match="is missing"):
        list(file_batches([gone], ARROW, options))


def removed_long_ago(folder):
    """Have the files that were replaced look as if that had been a week ago and more."""
    for path in Path(folder, "_delta_log").glob("0*.json"):
        path.write_text(re.sub('(?<="deletionTimestamp":)[0-9]+', "1000", path.read_text()))
    age(folder)


def test_replaced_files_go_after_a_week(batches):
    batches.add(*[3] * 20)
    list(compact(batches.archive))
    removed_long_ago(batches.folder)
    archive = Archive.load(batches.folder, LOG)
    assert archive.vacuum() == 20
    assert set(tree(batches.folder)) >= set(named(batches.folder))
    assert len(list(Path(batches.folder).glob("recorded*/*"))) == 1
    batches.assert_whole()
    assert archive.vacuum() == 0


def test_two_processes_remove_them(batches, monkeypatch):
    batches.add(*[3] * 20)
    list(compact(batches.archive))
    removed_long_ago(batches.folder)
    archive, delete = Archive.load(batches.folder, LOG), Store.delete
    monkeypatch.setattr(Store, "delete", lambda *each: [delete(*each), delete(*each)])
    assert archive.vacuum() == 20
    batches.assert_whole()


def test_what_is_in_their_place_is_checked_before_they_go(batches):
    batches.add(*[3] * 20)
    [merged] = compact(batches.archive)
    removed_long_ago(batches.folder)
    path = Path(batches.folder, merged.name)
    content = path.read_bytes()
    path.write_bytes(content[:100] + bytes([content[100] ^ 1]) + content[101:])
    before = tree(batches.folder)
    with pytest.raises(ArchiveRefused, match=f"damaged: {merged.name}"):
        Archive.load(batches.folder, LOG).vacuum()
    assert tree(batches.folder) == before
    path.write_bytes(content)
    assert Archive.load(batches.folder, LOG).vacuum() == 20
    batches.assert_whole()


def test_what_is_not_its_own_in_the_folder_stays(batches):
    """The archive of another log, whose rows were pruned, lies in a folder within."""
    batches.add(*[3] * 20)
    list(compact(batches.archive))
    inner = Batches(f"{batches.folder}/payments")
    inner.add(3, 4)
    Path(batches.folder, "report.html").touch()
    removed_long_ago(batches.folder)
    before = tree(inner.folder)
    assert Archive.load(batches.folder, LOG).vacuum() == 20
    assert tree(inner.folder) == before
    assert Path(batches.folder, "report.html").exists()
    batches.assert_whole()
    inner.assert_whole()


def test_delta_rs_would_merge_into_files_that_are_read_although_they_are_damaged(batches):
    """So it merges no files of ours. See "Hashes are in the names" in log-on-spark.md."""
    batches.add(*[3] * 3)
    DeltaTable(batches.folder).optimize.compact()
    [name] = {*named(batches.folder)} - {file.name for file in batches.archive.files()}
    path = Path(batches.folder, name)
    before = parquet.read_table(path, page_checksum_verification=True)
    # Compressed, the texts of a column are one text and the digits of the others.
    path.write_bytes(re.sub(rb"text (\d)(\d)", rb"text \2\2", path.read_bytes()))
    after = parquet.read_table(path, page_checksum_verification=True)
    assert len(set(before["stream"].to_pylist())) == 9
    assert len(set(after["stream"].to_pylist())) == 8
    refused = "is no file of an archive|has changed the archive"
    with pytest.raises(ArchiveRefused, match=refused):
        Archive.load(batches.folder, LOG)
