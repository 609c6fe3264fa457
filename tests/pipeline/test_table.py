"""The Delta table alone defines an archive; files and commits of other programs are not trusted."""

from __future__ import annotations

import json
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from outbox_app.pipeline import compaction
from outbox_app.pipeline.compaction import compact
from outbox_app.pipeline.driver.archive_lookup import load_archive
from outbox_app.pipeline.driver.comparison import ArchivedRows, compare
from outbox_app.pipeline.exceptions import ArchiveRefused
from outbox_app.pipeline.parquet import read_batches, write_days
from outbox_app.pipeline.schema import ddl, kind_of
from outbox_app.pipeline.store import Store
from outbox_app.pipeline.table import Archive

from .harness import age, archived, commits, killing, leftovers, tree
from .test_compaction import ARROW, LOG, Batches, offset

#: Batches of the proof that an offset outlives everything: a thousand by hand.
BATCHES = int(os.environ.get("ARCHIVE_BATCHES", "12"))
RACES = int(os.environ.get("ARCHIVE_RACES", "4"))


@pytest.fixture
def folder(tmp_path):
    return str(tmp_path / "archive")


@pytest.fixture
def filled(folder):
    batches = Batches(folder)
    batches.add(2, 2, 2)
    return batches


def test_an_archive_that_is_new_is_empty(folder):
    for _ in range(2):
        archive = Archive.make(folder, LOG, offset(0), ARROW)
        assert (archive.mark.batches, archive.end, archive.rows, archive.files()) == (
            0,
            offset(0),
            0,
            [],
        )
    assert len(commits(folder)) == 1


def test_a_commit_says_how_far_the_log_is_archived(filled, folder):
    table = DeltaTable(folder)
    [newest] = table.history(1)
    assert newest["outbox"] == {
        "log": LOG,
        "end": json.dumps(offset(3).dump()),
        "batches": 3,
        "rows": 6,
        "days": {"2026-01-01": [6, newest["outbox"]["days"]["2026-01-01"][1]]},
    }
    assert 0 < int(newest["outbox"]["days"]["2026-01-01"][1], 16) < 2**128
    assert table.transaction_version(f"outbox_app {LOG} db") == 3
    assert table.metadata().configuration == {"delta.enableExpiredLogCleanup": "false"}
    actions = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    first = min(actions, key=lambda each: each["min.id"])
    assert (first["num_records"], first["min.id"], first["max.id"]) == (2, 1, 2)
    assert (first["min.stream"], first["max.stream"]) == ("text 1", "text 2")
    assert first["min.recorded_at"] == first["max.recorded_at"]


@pytest.mark.parametrize("look", [0, 1])
def test_a_batch_may_be_committed_while_the_table_is_read(filled, folder, monkeypatch, look):
    """The history of a version holds what was committed since, under numbers that are not its."""
    history, looks = DeltaTable.history, []

    def meanwhile(table, limit=None):
        looks.append(limit)
        if len(looks) == look + 1:
            filled.add(1)
        return history(table, limit)

    monkeypatch.setattr(DeltaTable, "history", meanwhile)
    before = Archive.load(folder, LOG, offset(2))
    assert (before.rows, before.end) == (4, offset(2))
    assert Archive.load(folder, LOG).rows == 7


def test_a_folder_that_is_not_ours_is_left_alone(tmp_path):
    (tmp_path / "summer.jpg").write_text("dear")
    before = tree(tmp_path)
    with pytest.raises(ArchiveRefused, match=r"not empty \(it has 'summer.jpg'\)"):
        Archive.make(str(tmp_path), LOG, offset(0), ARROW)
    for nothing in (tmp_path, tmp_path / "none"):
        with pytest.raises(ArchiveRefused, match="is no archive: it is no Delta table"):
            Archive.load(str(nothing), LOG)
    assert tree(tmp_path) == before


def refused(folder, match):
    """Everybody refuses the archive, in one line, and nothing is written."""
    before = tree(folder)
    for use in (
        lambda: Archive.load(folder, LOG),
        lambda: Archive.make(folder, LOG, offset(0), ARROW),
        lambda: load_archive(folder, LOG),
    ):
        with pytest.raises(ArchiveRefused, match=match) as error:
            use()
        assert "\n" not in str(error.value)
    assert tree(folder) == before


def test_somebody_elses_table(folder):
    write_deltalake(folder, pa.table({"id": [1]}))
    refused(folder, "none of its commits says how far a log is archived")


def test_an_archive_is_of_one_log(filled, folder):
    with pytest.raises(ArchiveRefused, match="is the archive of the log 'outbox_event', not"):
        Archive.load(folder, "other_log")


def appended(folder):
    rows = pa.Table.from_pylist([Batches.row(Batches, 9)], schema=ARROW)
    day = pa.array([rows["recorded_at"][0].as_py().date()])
    write_deltalake(folder, rows.append_column("recorded_date", day), mode="append")


CHANGES = {
    "appended": (appended, "WRITE"),
    "deleted": (lambda folder: DeltaTable(folder).delete("id = 1"), "DELETE"),
    "emptied": (lambda folder: DeltaTable(folder).delete(), "DELETE"),
    "optimised": (lambda folder: DeltaTable(folder).optimize.compact(), "OPTIMIZE"),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_table_that_somebody_changed_is_refused_until_it_is_restored(filled, folder, kind):
    Batches.hours = 0
    change, operation = CHANGES[kind]
    archive = Archive.load(folder, LOG)
    change(folder)
    refused(folder, rf"version 4 \({operation}\).*restore\(3\)")
    # Even where it was opened before: a commit stands on the version that was checked.
    with pytest.raises(ArchiveRefused, match="Another program has changed"):
        archive.commit([], offset(4))
    DeltaTable(folder).restore(3)
    filled.archive = Archive.load(folder, LOG)
    filled.add(3)
    filled.assert_whole()


def test_what_changes_no_row_is_no_matter(filled, folder):
    """Also after it a commit of ours has to say where the log is archived to."""
    table = DeltaTable(folder)
    table.alter.set_table_description("all that happened")
    table.vacuum(retention_hours=0, enforce_retention_duration=False, dry_run=False, full=True)
    table.create_checkpoint()
    filled.archive = Archive.load(folder, LOG)
    filled.assert_whole()
    filled.add(1)
    filled.assert_whole()


def log_file(folder, version):
    return Path(folder, "_delta_log", f"{version:020d}.json")


def rewritten(version, change):
    def act(folder):
        path = log_file(folder, version)
        text = change(path.read_text())
        path.unlink() if text is None else path.write_text(text)

    return act


def marked(**changes):
    """Change what the newest commit says."""

    def change(text):
        first, *rest = text.splitlines()
        values = json.loads(first)
        values["commitInfo"]["outbox"] |= changes
        return "\n".join([json.dumps(values), *rest])

    return rewritten(3, change)


DAMAGE = {
    "empty": (rewritten(3, lambda text: ""), "commit of version 3 is empty"),
    "cut": (rewritten(3, lambda text: text[:-40]), "Delta log is invalid"),
    "an older one empty": (rewritten(2, lambda text: ""), "4 rows, but 6 by its newest commit"),
    "an older one cut": (rewritten(2, lambda text: text[:-40]), "Delta log is invalid"),
    "an older one missing": (rewritten(2, lambda text: None), "Delta log is invalid"),
    "no rows": (marked(rows="6"), "batches and rows are"),
    "other rows": (marked(rows=7), "6 rows, but 7 by its newest commit"),
    "no days": (marked(days=None), "days are None"),
    "no sum": (marked(days={"2026-01-01": [6, "?"]}), "days are"),
    "no offset": (marked(end="{}"), "is no offset"),
    "newer offset": (
        marked(end=json.dumps({**offset(3).dump(), "version": 2})),
        "this release reads version 1",
    ),
    "field": (marked(colour="red"), "Delta log is invalid"),
    "no statistics": (
        rewritten(3, lambda text: text.replace("numRecords", "numbers")),
        "is no file of an archive",
    ),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_log_is_refused(filled, folder, kind):
    damage, message = DAMAGE[kind]
    before = {path: path.read_bytes() for path in Path(folder, "_delta_log").iterdir()}
    damage(folder)
    refused(folder, message)
    for path, content in before.items():
        path.write_bytes(content)
    filled.archive = Archive.load(folder, LOG)
    filled.add(1)
    filled.assert_whole()


@pytest.mark.parametrize(
    "name",
    [
        "../outside-" + "0" * 32 + ".parquet",
        "/tmp/outside-" + "0" * 32 + ".parquet",
        "recorded_date=2026-01-01/../../outside-" + "0" * 32 + ".parquet",
        "s3://other/recorded_date=2026-01-01/00000000-" + "0" * 32 + ".parquet",
        "file:///etc/passwd",
        "recorded_date=2026-01-01/mine.parquet",
    ],
)
def test_a_table_that_names_a_file_elsewhere(filled, folder, name):
    [file] = [each for each in filled.archive.files() if each.first == 5]
    rewritten(3, lambda text: text.replace(file.name, name))(folder)
    refused(folder, "is no file of an archive|Delta log is invalid")


def test_a_folder_that_is_a_link_out_of_the_archive(filled, folder, tmp_path):
    outside = tmp_path / "outside"
    [day] = Path(folder).glob("recorded_date=*")
    day.rename(outside)
    day.symlink_to(outside)
    before = tree(outside)
    with pytest.raises(ArchiveRefused, match="leads out of it, by a symbolic link"):
        filled.add(1)
    with pytest.raises(ArchiveRefused, match="leads out of it, by a symbolic link"):
        filled.archive.read(filled.archive.files()[0])
    assert tree(outside) == before


def test_an_archive_whose_own_folder_is_a_link(filled, folder, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(folder)
    filled.archive = Archive.load(str(link), LOG)
    filled.add(1)
    filled.assert_whole()


def test_damage_is_found_by_who_reads_some_columns(filled, folder):
    """By the checksum of the page; readers of whole files compare the hash in the name."""
    file = filled.archive.files()[0]
    path = Path(folder, file.name)
    content = path.read_bytes()
    at = content.index(b"text 1")
    path.write_bytes(content[:at] + b"fake" + content[at + 4 :])
    store = Store(folder)
    for read in (
        lambda: filled.archive.read(file),
        lambda: list(read_batches(store, file, ["topic", "stream", "message_id"])),
    ):
        with pytest.raises(ArchiveRefused, match=f"damaged: {file.name} is missing"):
            read()


def test_one_of_two_commits(filled, folder):
    """However close they are: the other one is told, and its batch is there once."""
    for number in range(3, 3 + RACES):
        with ThreadPoolExecutor(2) as pool:
            both = [Archive.load(folder, LOG) for _ in range(2)]
            raced = [pool.submit(archive.commit, [], offset(number + 1)) for archive in both]
            [error] = [each.exception() for each in raced if each.exception()]
        assert "Another process has written to" in str(error)
        assert Archive.load(folder, LOG).mark.batches == number + 1
    filled.archive = Archive.load(folder, LOG)
    filled.add(1)
    filled.assert_whole()


def test_a_commit_of_two_that_make_an_archive(folder):
    with ThreadPoolExecutor(2) as pool:
        made = [pool.submit(Archive.make, folder, LOG, offset(0), ARROW) for _ in range(2)]
        assert [each.result().mark.batches for each in made] == [0, 0]
    assert len(commits(folder)) == 1


def test_another_process_makes_the_archive_while_the_folder_is_listed(folder, monkeypatch):
    listed = Store.list

    def made_meanwhile(store, *args):
        monkeypatch.setattr(Store, "list", listed)
        Archive.make(folder, LOG, offset(0), ARROW)
        return listed(store, *args)

    monkeypatch.setattr(Store, "list", made_meanwhile)
    assert Archive.make(folder, LOG, offset(0), ARROW).mark.batches == 0
    assert len(commits(folder)) == 1


def test_a_log_is_given_a_column(filled, folder):
    wider = ARROW.append(pa.field("note", pa.string()))
    filled.archive.add_columns(wider)
    filled.archive.add_columns(ARROW)  # and loses it
    assert filled.archive.schema == wider
    filled.add(1)
    filled.assert_whole()
    assert DeltaTable(folder).to_pyarrow_dataset().to_table()["note"].to_pylist() == [None] * 7
    with pytest.raises(ArchiveRefused, match=r"Column note .* is int64 now, .* it is string"):
        filled.archive.add_columns(ARROW.append(pa.field("note", pa.int64())))
    filled.assert_whole()


@pytest.mark.parametrize("name", ["recorded_date", "Recorded_Date", "a b", "a,b", "x=y"])
def test_a_name_that_no_table_can_have(folder, filled, name, tmp_path):
    wider = ARROW.append(pa.field(name, pa.string()))
    for use in (
        lambda: filled.archive.add_columns(wider),
        lambda: Archive.make(str(tmp_path / "new"), LOG, offset(0), wider),
    ):
        with pytest.raises(ArchiveRefused, match="cannot have the log's column"):
            use()
    filled.assert_whole()


def test_types_of_databases():
    kinds = {
        "boolean": ["bool", "boolean", "tinyint(1)"],
        "bigint": ["integer", "int(11)", "smallint unsigned", "bigint(20) unsigned", "INTEGER"],
        "double": ["double precision", "real", "double"],
        "binary": ["bytea", "BLOB", "longblob"],
        "date": ["date"],
        "timestamp": ["timestamp with time zone", "datetime(6)", "datetime"],
        "decimal(10,2)": ["numeric(10,2)", "decimal(10, 2)"],
        "string": ["interval", "integer[]", "uuid", "jsonb", "numeric", "decimal(65,2)", "text"],
    }
    assert {kind: [kind_of(each) for each in given] for kind, given in kinds.items()} == {
        kind: [kind] * len(given) for kind, given in kinds.items()
    }
    assert ddl({"a": "int", "Ä b": "string", "`": "date"}) == "a int, `Ä b` string, ```` date"


def test_the_offset_outlives_clean_up(folder):
    """Checkpoints have no metadata of commits: the newest commit has to stay."""
    batches = Batches(folder)
    batches.add(*[1] * BATCHES)
    list(compact(batches.archive))
    table = DeltaTable(folder)
    table.create_checkpoint()
    then = table.history(1)[0]["timestamp"] / 1000 - 40 * 86400
    for path in Path(folder, "_delta_log").iterdir():
        os.utime(path, (then, then))
    batches.archive.vacuum()
    assert len(list(Path(folder, "_delta_log").glob("0*.json"))) == 1
    Path(folder, "recorded_date=2026-01-01", "left.parquet").touch()
    age(folder)
    again = Archive.load(folder, LOG)
    again.vacuum()
    assert "left.parquet" not in os.listdir(Path(folder, "recorded_date=2026-01-01"))
    batches.archive = Archive.load(folder, LOG)
    assert (again.end, again.mark.batches) == (offset(BATCHES), BATCHES)
    batches.add(2)
    rows = DeltaTable(folder).to_pyarrow_dataset().to_table(columns=["id"])
    assert sorted(rows["id"].to_pylist()) == [row[0] for row in batches.rows]


def test_the_offset_outlives_clean_up_where_others_have_committed(folder):
    batches = Batches(folder)
    batches.add(*[1] * BATCHES)
    table = DeltaTable(folder)
    table.alter.set_table_description("Events")
    table.create_checkpoint()
    then = table.history(1)[0]["timestamp"] / 1000 - 40 * 86400
    for path in Path(folder, "_delta_log").iterdir():
        os.utime(path, (then, then))
    Archive.load(folder, LOG).vacuum()
    assert Archive.load(folder, LOG).end == offset(BATCHES)


class Machine(RuleBasedStateMachine):
    """Archive, be killed, compact, vacuum, prune, add a column: the rows are those passed."""

    def __init__(self):
        super().__init__()
        self.folder = tempfile.TemporaryDirectory()
        self.batches = Batches(f"{self.folder.name}/archive")
        self.columns = self.pruned = 0

    @rule(size=st.integers(0, 4))
    def archive(self, size):
        self.batches.add(size)

    @rule(size=st.integers(1, 4), point=st.sampled_from(["archive_committed", "before"]))
    def is_killed(self, size, point):
        passed, rows = self.batches.archive.mark.batches, list(self.batches.rows)
        ids = self.batches.ids
        if point == "before":
            made = [self.batches.row(id) for id in range(10**6, 10**6 + size)]
            left = pa.Table.from_pylist(made, schema=ARROW).to_batches()
            write_days(left, self.batches.archive.store, f"{passed:08d}-killed", ARROW)
        else:
            with killing(point):
                self.batches.add(size)
            rows = self.batches.rows
        self.batches.archive = Archive.load(self.batches.folder, LOG)
        self.batches.rows, self.batches.ids = rows, ids

    @rule()
    def compact(self):
        list(compact(self.batches.archive))

    @rule()
    def vacuum(self):
        age(self.batches.folder)
        self.batches.archive.vacuum()
        assert leftovers(self.batches.folder) == set()

    @precondition(lambda self: self.columns < 2)
    @rule()
    def add_a_column(self):
        self.columns += 1
        more = [pa.field(f"more{n}", pa.string()) for n in range(self.columns)]
        self.batches.archive.add_columns(pa.schema([*ARROW, *more]))

    @rule()
    def prune(self):
        """What a killed process has left is no reason to delete a row."""
        ids = [row[0] for row in self.batches.rows[self.pruned :]]
        made = [self.batches.row(id) for id in [*ids, 10**6, 10**6 + 1]]
        log = pa.RecordBatch.from_pylist(made, schema=ARROW)
        equal: set[int] = set()
        for part in ArchivedRows(Archive.load(self.batches.folder, LOG)).of(log["id"]):
            same, differing = compare(log, part)
            assert differing == {}
            equal.update(same)
        assert equal == set(ids)
        self.pruned += len(ids)

    @rule()
    def somebody_else_goes_on(self):
        self.batches.archive = Archive.load(self.batches.folder, LOG)

    @invariant()
    def the_rows_are_those_passed(self):
        assert archived(self.batches.folder) == self.batches.rows
        archive = Archive.load(self.batches.folder, LOG)
        assert archive.rows == len(self.batches.rows)
        assert archive.end == self.batches.archive.end

    def teardown(self):
        self.folder.cleanup()


def test_whatever_happens_the_rows_are_those_passed(monkeypatch):
    monkeypatch.setattr(compaction, "FILES", 3)
    run_state_machine_as_test(
        Machine,
        settings=settings(
            max_examples=int(os.environ.get("ARCHIVE_EXAMPLES", "3")),
            stateful_step_count=12,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
        ),
    )
