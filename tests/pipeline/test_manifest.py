"""The manifest is the only truth, and one that is damaged is believed by nobody."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from outbox_app.exceptions import ArchiveRefused
from outbox_app.pipeline import manifest as module
from outbox_app.pipeline.manifest import Entry, File, Manifest, last_batch
from outbox_app.pipeline.offset import Offset
from outbox_app.pipeline.store import Store

from .harness import Killed, killing, tree

LOG = "outbox_event"


@pytest.fixture
def store(tmp_path):
    return Store(str(tmp_path / "archive"))


def offset(number):
    return Offset(LOG, "db", number, f"id-{number}", f'{{"pos": {number}}}')


def entry(store, first, last=None, *, files=1):
    """Write the files of an entry to where a task leaves them."""
    last = first if last is None else last
    made = []
    for n in range(files):
        span = f"{first:08d}" if first == last else f"{first:08d}-{last:08d}"
        name = f"data/date=2026-01-0{n + 1}/{span}-{first:06x}{last:05x}{n:x}.parquet"
        file = File(name, 1, 5, "0" * 64, first + 1, last + 1)
        store.write(file.incoming, b"12345")
        made.append(file)
    return Entry(first, last, offset(first), offset(last + 1), made, verified=1.5)


@pytest.fixture
def filled(store):
    manifest = Manifest.make(store, LOG)
    for number in range(3):
        manifest.commit(entry(store, number, files=2))
    return store


def names(manifest):
    return [each.name.rpartition("/")[2] for each in manifest.entries]


def test_an_entry_is_read_as_it_was_written(store):
    made = entry(store, 7, 9, files=2)
    read = Entry.load(made.dump())
    assert read == replace(made, files=tuple(made.files))
    assert read.rows == 2


def test_a_manifest_is_read_as_it_was_written(filled):
    manifest = Manifest.load(filled, LOG)
    assert names(manifest) == [f"{n:08d}-{n:08d}.json" for n in range(3)]
    assert (manifest.next, manifest.end, manifest.rows) == (3, offset(3), 6)
    assert all(file.name in filled.list() for file in manifest.files())
    assert filled.list("_incoming") == {}
    assert manifest.again().entries == manifest.entries


def test_an_archive_that_is_new_is_empty(store):
    manifest = Manifest.make(store, LOG)
    assert (manifest.next, manifest.end, manifest.rows, manifest.files()) == (0, None, 0, [])
    assert Manifest.make(store, LOG).entries == []


def test_a_folder_that_is_not_ours_is_left_alone(store):
    store.write("photos/summer.jpg", b"dear")
    before = tree(store.root)
    for refuse in (Manifest.make, Manifest.load):
        with pytest.raises(ArchiveRefused, match="is no archive"):
            refuse(store, LOG)
    assert tree(store.root) == before


def test_an_archive_is_of_one_log(filled):
    for refuse in (Manifest.make, Manifest.load):
        with pytest.raises(ArchiveRefused, match="is the archive of the log 'outbox_event', not"):
            refuse(filled, "other_log")


def spoiled(change):
    def act(root):
        path = root / "_manifest/00000001-00000001.json"
        content = change(path.read_text())
        path.unlink() if content is None else path.write_bytes(content)

    return act


def resealed(**changes):
    """Return an entry with other values and a checksum that fits."""

    def change(text):
        from outbox_app.pipeline.manifest import _digest

        values = json.loads(text) | changes
        del values["sha256"]
        return json.dumps({"sha256": _digest(values), **values}).encode()

    return spoiled(change)


def identity(text):
    return lambda root: (root / "_manifest/archive.json").write_text(text)


NONSENSE = "00000001-00000001.json is invalid"
DAMAGE = {
    "empty": (spoiled(lambda text: b""), NONSENSE),
    "cut": (spoiled(lambda text: text[:-20].encode()), NONSENSE),
    "digit": (spoiled(lambda text: text.replace("1.5", "1.6").encode()), "does not fit"),
    "bit": (spoiled(lambda text: text.encode().replace(b"id-1", b"id\xff1")), NONSENSE),
    "list": (spoiled(lambda text: b"[]"), NONSENSE),
    "object": (spoiled(lambda text: b"{}"), NONSENSE),
    "first missing": (
        lambda root: (root / "_manifest/00000000-00000000.json").unlink(),
        "batch 0 should follow here",
    ),
    "missing": (spoiled(lambda text: None), "batch 1 should follow here"),
    "renamed": (resealed(first=2, last=2), "holds the entry _manifest/00000002-00000002.json"),
    "torn": (resealed(end=offset(7).dump()), "batch 2 should follow here"),
    "field": (resealed(colour="red"), NONSENSE),
    "newer": (resealed(end={**offset(2).dump(), "version": 2}), "this release knows 1"),
    "newer archive": (identity('{"format": 2, "log": "outbox_event"}'), "this release knows 1"),
    "identity": (identity("{"), "archive.json is invalid"),
    "no log": (identity("{}"), "archive.json is invalid"),
    "no identity": (lambda root: (root / "_manifest/archive.json").unlink(), "is no archive"),
}


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_manifest_is_refused(filled, kind):
    damage, message = DAMAGE[kind]
    damage(Path(filled.root))
    before = tree(filled.root)
    for refuse in (Manifest.load, Manifest.make):
        with pytest.raises(ArchiveRefused) as refused:
            refuse(filled, LOG)
        assert message in str(refused.value)
        assert "\n" not in str(refused.value)
    assert tree(filled.root) == before


def test_the_files_of_a_lost_entry_are_no_leftovers(filled):
    """Without its last entry a manifest is whole; the log may have been pruned meanwhile."""
    filled.delete("_manifest/00000002-00000002.json")
    before = tree(filled.root)
    manifest = Manifest.load(filled, LOG)
    with pytest.raises(ArchiveRefused, match="its entry in _manifest is missing"):
        manifest.tidy()
    assert tree(filled.root) == before


@pytest.mark.parametrize("size", [None, 4])
def test_a_file_that_is_missing_or_cut_is_noticed(filled, size):
    file = Manifest.load(filled, LOG).files()[3]
    filled.delete(file.name)
    if size:
        filled.write(file.name, b"1" * size)
    before = tree(filled.root)
    with pytest.raises(ArchiveRefused, match=f"damaged: {file.name} is not there, or not as it"):
        Manifest.load(filled, LOG).tidy()
    assert tree(filled.root) == before


def test_what_was_left_is_removed_and_nothing_else(filled):
    before = filled.list()
    entry(filled, 3)
    for name in ("_incoming/x.parquet", "_manifest/00000003-00000003.json.1.tmp"):
        filled.write(name, b"left")
    for name in ("data/date=2026-01-01/mine.parquet", "README.txt"):
        filled.write(name, b"not ours")
    Manifest.load(filled, LOG).tidy()
    assert set(filled.list()) - set(before) == {"data/date=2026-01-01/mine.parquet", "README.txt"}
    assert set(before) <= set(filled.list())


@pytest.mark.parametrize("moved", [0, 1, 2])
def test_a_commit_that_was_cut_short_is_ended(filled, monkeypatch, moved):
    manifest = Manifest.load(filled, LOG)
    made = entry(filled, 3, files=3)
    _killed_at(monkeypatch, filled, "move", 1 + moved)  # the entry is moved first
    with pytest.raises(Killed):
        manifest.commit(made)
    monkeypatch.undo()
    again = Manifest.load(filled, LOG)
    assert again.entries[-1].files == tuple(made.files)
    for file in again.files():  # readers need not wait for it
        assert any(place in filled.list() for place in again.places(file))
    again.tidy()
    assert {file.name for file in made.files} <= set(filled.list("data"))
    assert filled.list("_incoming") == {}


def test_a_move_that_is_a_copy_may_be_cut_short(filled):
    """Object stores copy, and then delete."""
    file = Manifest.load(filled, LOG).files()[-1]
    filled.write(file.incoming, filled.read(file.name))
    Manifest.load(filled, LOG).tidy()
    assert filled.list("_incoming") == {}
    assert file.name in filled.list()


@pytest.mark.parametrize("method", ["delete", "move"])
@pytest.mark.parametrize("passed", range(8))
def test_entries_that_are_put_together_count_once(filled, monkeypatch, method, passed):
    """Whenever it is cut short: the rows of three entries are there, in one place or another."""
    manifest = Manifest.load(filled, LOG)
    old = {file.base for file in manifest.files()}
    merged = entry(filled, 0, 2)
    _killed_at(monkeypatch, filled, method, passed)
    with suppress(Killed):
        manifest.commit(merged)
    monkeypatch.undo()
    again = Manifest.load(filled, LOG)
    assert names(again) in (
        ["00000000-00000002.json"],
        [f"{n:08d}-{n:08d}.json" for n in range(3)],
    )
    again.tidy()
    assert {name.rpartition("/")[2] for name in filled.list("data")} == (
        {merged.files[0].base} if len(again.entries) == 1 else old
    )
    assert filled.list("_incoming") == {}
    assert again.entries == Manifest.load(filled, LOG).entries


def test_who_reads_the_old_files_can_finish(filled, monkeypatch):
    reader = Manifest.load(filled, LOG)
    merged = entry(filled, 0, 2)
    Manifest.load(filled, LOG).commit(merged)
    for file in reader.files():
        assert any(place in filled.list() for place in reader.places(file))
    # An hour later they go.
    now = module.time.time()
    monkeypatch.setattr(module.time, "time", lambda: now + module.REPLACED_SECONDS + 5)
    Manifest.load(filled, LOG).tidy()
    assert filled.list("_replaced") == {}


def test_a_file_is_found_while_it_is_moved(filled):
    """Between two looks of a reader it is moved, to its place or away from it."""
    manifest = Manifest.load(filled, LOG)
    made = entry(filled, 3)
    [file] = made.files
    looks = manifest.places(file)
    assert next(looks) == file.name  # not there yet
    manifest.commit(made)
    assert any(place in filled.list() for place in looks)
    looks = manifest.places(file)
    assert [next(looks), next(looks), next(looks)][-1] == file.name
    manifest.commit(entry(filled, 0, 3))  # which was there, but not any more
    assert any(place in filled.list() for place in looks)


def test_a_manifest_may_be_read_while_entries_are_put_together(filled, monkeypatch):
    """What was listed is gone when it is read; a listing may have neither old nor new."""
    listing, reader, calls = filled.list, Store(filled.folder), []

    def read(name, original=reader.read):
        if not calls and "0000" in name:
            calls.append(name)
            Manifest.load(filled, LOG).commit(entry(filled, 0, 2))
        return original(name)

    monkeypatch.setattr(reader, "read", read)
    assert names(Manifest.load(reader, LOG)) == ["00000000-00000002.json"]
    torn = [["_manifest/archive.json"]]

    def list_(name=""):
        return dict.fromkeys(torn.pop(), 1) if torn and name == "_manifest" else listing(name)

    monkeypatch.setattr(reader, "list", list_)
    assert names(Manifest.load(reader, LOG)) == ["00000000-00000002.json"]


def test_names_of_files_tell_their_batches():
    tail = "0123456789ab.parquet"
    assert last_batch(f"data/date=2026-01-01/00000007-{tail}") == 7
    assert last_batch(f"data/date=2026-01-01/00000007-00000123-{tail}") == 123
    for name in ("data/x.parquet", f"_incoming/00000007-{tail}", f"data/date=2026/my-7-{tail}"):
        assert last_batch(name) is None


def test_killed_between_entry_and_move(filled):
    manifest = Manifest.load(filled, LOG)
    with killing("archive_committed"):
        manifest.commit(entry(filled, 3))
    again = Manifest.load(filled, LOG)
    assert again.next == 4
    again.tidy()
    assert filled.list("_incoming") == {}


def _killed_at(monkeypatch, store, method, passed):
    original, left = getattr(store, method), [passed]

    def act(*arguments):
        if left[0] == 0:
            raise Killed
        left[0] -= 1
        return original(*arguments)

    monkeypatch.setattr(store, method, act)


@pytest.mark.parametrize(
    "name",
    [
        "../outside.parquet",
        "/tmp/outside.parquet",
        "data/date=2026-01-01/../../../00000000-0123456789ab.parquet",
        "data/../00000000-0123456789ab.parquet",
        "_manifest/archive.json",
        "data/date=2026-01-01/00000000-0123456789ab.parquet/../x",
        "s3://other/data/date=2026-01-01/00000000-0123456789ab.parquet",
        "",
        7,
    ],
)
def test_an_entry_that_names_a_file_elsewhere(filled, name, tmp_path):
    """Its checksum fits: somebody has made it anew."""
    manifest = Manifest.load(filled, LOG)
    entry = manifest.entries[1]
    tampered = replace(entry, files=[replace(entry.files[0], name=name), entry.files[1]])
    filled.write(entry.name, tampered.dump())
    before = tree(tmp_path)
    for use in (lambda: Manifest.load(filled, LOG), manifest.again, lambda: prune_reader(filled)):
        with pytest.raises(ArchiveRefused, match=r"is damaged: _manifest/.*Nothing was written\.$"):
            use()
    assert tree(tmp_path) == before


def prune_reader(store):
    from outbox_app.pipeline.driver.archive_lookup import ArchiveLookup

    return ArchiveLookup(store.folder, LOG)


@pytest.mark.parametrize("folder", ["_replaced", "_incoming", "data/date=2026-01-02", "_manifest"])
def test_a_folder_that_is_a_link_out_of_the_archive(filled, folder, tmp_path):
    """Nothing is written, moved or deleted beyond it."""
    outside = tmp_path / "outside"
    here = Path(filled.folder, folder)
    if here.exists():
        here.rename(outside)
    else:
        outside.mkdir()
    (outside / "precious.json").write_text("{}")
    (outside / f"1-{'0' * 8}-old.parquet").write_text("old")
    here.symlink_to(outside)
    before = tree(outside)

    def use():
        manifest = Manifest.load(filled, LOG)
        manifest.tidy()
        manifest.commit(entry(filled, 3, files=2))
        manifest.commit(replace(manifest.entries[0], last=1, end=manifest.entries[1].end))

    with pytest.raises(ArchiveRefused, match="leads out of it, by a symbolic link"):
        use()
    assert tree(outside) == before


def test_an_archive_whose_own_folder_is_a_link(filled, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(filled.folder)
    manifest = Manifest.load(Store(str(link)), LOG)
    manifest.tidy()
    assert manifest.next == 3
