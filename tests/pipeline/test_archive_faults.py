"""Faults while archiving: each gives a clear error, and afterwards the archive equals the log."""

from __future__ import annotations

import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
from django.core.management.color import no_style
from django.db import connections

from outbox_app.events.exceptions import ForeignCursor, ReadRefused
from outbox_app.events.models import Event
from outbox_app.pipeline import archiver
from outbox_app.pipeline.archiver import Archiver
from outbox_app.pipeline.exceptions import ArchiveRefused, Unreachable
from outbox_app.pipeline.options import Options
from outbox_app.pipeline.store import Store
from outbox_app.pipeline.table import Archive
from tests.events.log.own_log.models import Ledger
from tests.faults.conftest import SERVERS
from tests.faults.tools import on, outbox_on
from tests.patience import patience
from tests.servers.mysql import MARIADB

from .harness import (
    archive,
    archived,
    assert_exact,
    entries,
    leftovers,
    logged,
    publish_some,
    source,
    tree,
)
from .local_context import LocalContext

database = pytest.mark.django_db(transaction=True)


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "archive"


@database
@on("default")
def test_a_folder_that_is_not_ours_is_left_untouched(alias, new_log, folder):
    publish_some(alias, 3)
    folder.mkdir()
    (folder / "thesis.doc").write_bytes(b"years of work")
    with pytest.raises(ArchiveRefused, match=r"no archive, and not empty \(it has 'thesis.doc'\)"):
        archive(alias, folder)
    assert list(tree(folder)) == ["thesis.doc"]


@database
@on("default")
def test_the_archive_of_another_log(alias, new_log, folder):
    publish_some(alias, 3)
    archive(alias, folder)
    before = tree(folder)
    with pytest.raises(ArchiveRefused, match="archive of the log 'outbox_event', not of"):
        archive(alias, folder, log=Ledger)
    assert tree(folder) == before


@database
@on("postgres", "mariadb")
def test_the_archive_of_another_database(alias, new_log, folder):
    publish_some(alias, 3)
    archive(alias, folder)
    before = tree(folder)
    [other] = {"postgres", MARIADB} - {alias}
    with pytest.raises(ForeignCursor, match="another database"):
        archive(other, folder)
    assert tree(folder) == before


@database
def test_a_log_that_was_set_back(alias, new_log, folder):
    """Restored from a dump: as many events, but others."""
    publish_some(alias, 6)
    archive(alias, folder)
    before = tree(folder)
    newest = Event.objects.using(alias).order_by("-pk")[0]
    Event.objects.using(alias).filter(pk=newest.pk).update(message_id=uuid4())
    with pytest.raises(ForeignCursor, match="another database, or it was restored"):
        archive(alias, folder)
    assert tree(folder) == before


@database
@pytest.mark.parametrize("point", ["archive_planned", "archive_copied"])
def test_a_row_that_is_deleted_before_it_is_counted(alias, new_log, folder, at, point):
    ids = publish_some(alias, 10)
    row = Event.objects.using(alias).filter(pk=ids[5])
    at("archive_done", lambda: at(point, row.delete))  # in the second batch
    if point == "archive_planned":
        archive(alias, folder)
    else:
        with pytest.raises(
            ArchiveRefused, match=r"4 rows of outbox_event .* but .* counts 3: rows"
        ):
            archive(alias, folder)
        assert [entry["batches"] for entry in entries(folder)] == [1]
        assert leftovers(folder) == set()
        archive(alias, folder)
    assert_exact(alias, folder)


@database
def test_rows_that_a_task_has_not_read(alias, new_log, folder, monkeypatch):
    """As where a connection is cut and a driver takes that for the end."""
    original = archiver.batches

    def cut(*arguments):
        return [batch.slice(1) for batch in original(*arguments)]

    publish_some(alias, 10)
    monkeypatch.setattr(archiver, "batches", cut)
    with pytest.raises(ArchiveRefused, match=r"3 rows of outbox_event .* but .* counts 4: rows"):
        archive(alias, folder)
    assert leftovers(folder) == set()
    monkeypatch.undo()
    archive(alias, folder)
    assert_exact(alias, folder)


@database
@on("default")
def test_the_reason_is_told_where_the_files_of_a_batch_cannot_be_removed(
    alias, new_log, folder, at, monkeypatch
):
    """In an object store that has gone away meanwhile. Else a follower would try again."""
    ids = publish_some(alias, 4)

    def away(store):
        raise Unreachable("Access failed")

    def change():
        Event.objects.using(alias).filter(pk=ids[1]).delete()
        monkeypatch.setattr(Store, "list", away)

    at("archive_copied", change)
    with pytest.raises(ArchiveRefused, match="rows were deleted meanwhile"):
        archive(alias, folder)


@database
@on("default")
@pytest.mark.parametrize("damage", ["missing", "cut", "flipped"])
def test_a_damaged_file(alias, new_log, folder, damage, monkeypatch):
    """What is missing or cut is seen at once; what has rotted, when somebody reads it."""
    publish_some(alias, 8)
    archive(alias, folder)
    [path, *_] = sorted(folder.glob("recorded_date=*/*"))
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    elif damage == "cut":
        path.write_bytes(content[:-1])
    else:
        path.write_bytes(content[:50] + bytes([content[50] ^ 4]) + content[51:])
        monkeypatch.setattr("outbox_app.pipeline.compaction.FILES", 2)
    publish_some(alias, 1)
    with pytest.raises(ArchiveRefused, match=f"is damaged: .*{path.name} is missing") as refused:
        archive(alias, folder)
    assert "Put it back from a copy" in str(refused.value)
    path.write_bytes(content)
    archive(alias, folder)
    assert_exact(alias, folder)


@database
@on("default")
@pytest.mark.parametrize("point", ["archive_planned", "archive_copied", "archive_counted"])
def test_of_two_archivers_one_commits(alias, new_log, folder, at, point):
    """The one that comes later is told, and nothing of its batch counts."""
    publish_some(alias, 6)
    with ThreadPoolExecutor(1) as other:

        def second():
            assert other.submit(archive, alias, folder).result(patience()) == 6

        at(point, second)
        with pytest.raises(ArchiveRefused, match="Another process has written to"):
            archive(alias, folder)
    assert len(entries(folder)) == 2
    assert_exact(alias, folder)


@database
@on("default")
def test_a_run_beside_one_that_follows(alias, new_log, folder, monkeypatch):
    """What the other has archived counts, and who follows goes on behind it."""
    vacuumed, left = [], [1, 2, 3]
    monkeypatch.setattr(Archive, "vacuum", lambda self: len(vacuumed.append(self) or []))

    def wait(seconds):
        if seconds and left:
            publish_some(alias, left.pop())
            archive(alias, folder)
            publish_some(alias, 2)
            return False
        return bool(seconds)

    Archiver(Following(), source(alias), str(folder), write=str).follow(1.0, wait)
    assert_exact(alias, folder)
    assert len(entries(folder)) == 6
    assert len(vacuumed) == 4  # once a day each


@database
@on("default", "mariadb")
def test_a_log_that_is_emptied_while_one_follows(alias, new_log, folder):
    """Its first new events have positions that the archive has passed already."""
    left = [8, 6]

    def wait(seconds):
        if not left:
            return True
        if seconds and len(left) == 2:
            publish_some(alias, left.pop())
        elif seconds:
            operations = connections[alias].ops
            emptied = operations.sql_flush(no_style(), ["outbox_event"], reset_sequences=True)
            operations.execute_sql_flush(emptied)
            publish_some(alias, left.pop())
        return False

    with pytest.raises(ForeignCursor):
        Archiver(Following(), source(alias), str(folder), write=str).follow(1.0, wait)
    assert len(archived(folder)) == 6


@database
@on("default")
def test_one_that_is_to_stop_does_not_look_for_old_files(alias, new_log, folder, monkeypatch):
    """That reads whole days of the archive, and a supervisor kills what takes long to end."""
    publish_some(alias, 6)
    vacuumed, said = [], []
    monkeypatch.setattr(Archive, "vacuum", lambda self: len(vacuumed.append(self) or []))
    archiver = Archiver(LocalContext(), source(alias), str(folder), max_rows=4, write=said.append)
    assert archiver.run(lambda: bool(said)) == 4
    assert vacuumed == []
    assert archiver.run() == 2
    assert len(vacuumed) == 1


@database
def test_a_commit_that_is_lost_with_rows_that_were_pruned(alias, new_log, folder):
    """Without its newest commit a table is whole; its rows may be nowhere else."""
    ids = publish_some(alias, 8)
    archive(alias, folder)
    newest = max(folder.glob("_delta_log/0*.json"))
    newest.unlink()
    archive(alias, folder)  # they are still in the log: a process could have been killed there
    assert archived(folder) == logged(alias)
    content = newest.read_text()
    Event.objects.using(alias).filter(pk__in=ids).delete()
    newest.unlink()
    before = tree(folder)
    with pytest.raises(ArchiveRefused, match=r"no commit names .*, and the log no longer has"):
        archive(alias, folder)
    assert tree(folder) == before
    newest.write_text(content)
    archive(alias, folder)
    assert {row[0] for row in archived(folder)} == set(ids)


@pytest.fixture
def small_disk(tmp_path):
    """``small_disk(size)``: mount a file system of this size."""
    folder, made = tmp_path / "disk", []

    def make(size, *options):
        folder.mkdir(exist_ok=True)
        extra = ",".join([f"size={size}", *options])
        command = ["mount", "-t", "tmpfs", "-o", extra, "outbox-tests", str(folder)]
        if os.geteuid() or subprocess.run(command, capture_output=True, check=False).returncode:
            pytest.skip("only root can mount a file system")
        made.append(folder)
        return folder

    yield make
    for each in made:
        subprocess.run(["umount", str(each)], check=True)


@database
@on("default")
def test_the_disk_is_full(alias, new_log, small_disk):
    """At whatever byte: what was written is whole, and when there is room it goes on."""
    disk = small_disk("1m")
    folder, ballast = disk / "archive", disk / "ballast"
    failures = 0
    for free in range(4096, 120_000, 8192):
        publish_some(alias, 4, metadata={"noise": os.urandom(3000).hex()})
        stat = os.statvfs(disk)
        ballast.write_bytes(b"x" * max(0, stat.f_bavail * stat.f_frsize - free))
        errors = []
        try:
            archive(alias, folder)
        except OSError as error:
            errors.append(str(error))
        assert all("No space left on device" in error for error in errors)
        failures += len(errors)
        ballast.unlink()
        so_far = archived(folder) if (folder / "_delta_log").exists() else []
        assert len({row[0] for row in so_far}) == len(so_far)
    assert 2 < failures < 15
    archive(alias, folder)
    assert_exact(alias, folder)


@database
@on("default")
def test_a_folder_that_cannot_be_written_to(alias, new_log, small_disk):
    disk = small_disk("1m")
    publish_some(alias, 3)
    archive(alias, disk / "archive")
    before = tree(disk)
    publish_some(alias, 3)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    for folder in (disk / "archive", disk / "another"):
        with pytest.raises(OSError, match="Read-only file system"):
            archive(alias, folder)
    assert tree(disk) == before
    subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    archive(alias, disk / "archive")
    assert_exact(alias, disk / "archive")


class Waiting:
    """Ends ``follow`` after so many waits, and notes how long each would have been."""

    def __init__(self, number):
        self.number = number
        self.waits = []

    def __call__(self, seconds):
        if seconds:
            self.waits.append(seconds)
        return len(self.waits) > self.number


class Following(LocalContext):
    """A session that Spark is behind of, as far as ``follow`` can see."""

    stopped = False

    @property
    def _jsc(self):
        return self

    def sc(self):
        return self

    def isStopped(self):
        return self.stopped


def test_following_goes_on_by_itself(monkeypatch, tmp_path):
    """It waits longer and longer, not at all when all is well, and never runs hot."""
    waits, said = Waiting(9), []
    archiver = Archiver(Following(), OPTIONS, str(tmp_path / "a"), write=said.append)
    monkeypatch.setattr(archiver, "_opened", _fail(OSError(28, "No space left on device")))
    archiver.follow(120.0, waits)
    assert waits.waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0, 60.0, 60.0]
    assert said[0] == (
        "archive is tried again in=1s error=OSError: [Errno 28] No space left on device"
    )


@pytest.mark.parametrize("error", [ArchiveRefused("damaged"), ReadRefused("restored")])
def test_following_does_not_go_on_with_what_is_damaged(monkeypatch, tmp_path, error):
    archiver = Archiver(Following(), OPTIONS, str(tmp_path / "a"))
    monkeypatch.setattr(archiver, "_opened", _fail(error))
    with pytest.raises(type(error)):
        archiver.follow(1.0, Waiting(3))


def test_following_ends_with_spark(monkeypatch, tmp_path):
    session = Following()
    session.stopped = True
    archiver = Archiver(session, OPTIONS, str(tmp_path / "a"))
    monkeypatch.setattr(archiver, "_opened", _fail(RuntimeError("the context is gone")))
    with pytest.raises(RuntimeError):
        archiver.follow(1.0, Waiting(3))


@pytest.fixture(scope="module", params=list(SERVERS))
def server(request):
    if request.param not in connections:
        pytest.skip(f"no {request.param}")
    with SERVERS[request.param]() as server:
        yield server


@pytest.fixture
def private(server, django_db_blocker, settings):
    """An alias on a server that may be killed."""
    with outbox_on(server.url, django_db_blocker, settings) as alias:
        yield alias


@pytest.mark.parametrize("point", ["archive_planned", "archive_copied", "archive_done"])
def test_the_database_is_restarted_in_the_middle(server, private, folder, at, point):
    """Once an error that says so; following goes on by itself."""
    alias = private

    def restart():
        server.kill()
        server.start()
        connections[alias].close()

    publish_some(alias, 10)
    at(point, restart)
    if point == "archive_copied":
        said, waits = [], Waiting(2)
        archiver = Archiver(Following(), source(alias), str(folder), max_rows=4, write=said.append)
        archiver.follow(0.5, waits)
        assert sum("The database " in line for line in said) == 1
    else:
        with pytest.raises(Unreachable, match=r"The database .* failed") as lost:
            archive(alias, folder)
        assert "\n" not in str(lost.value)
        archive(alias, folder)
    assert_exact(alias, folder)


def test_the_database_is_away(server, private, folder):
    publish_some(private, 3)
    options = source(private, connect_timeout=0.1)
    server.stop()
    try:
        with pytest.raises(Unreachable, match=r"Connecting to .* failed"):
            Archiver(LocalContext(), options, str(folder)).run()
    finally:
        server.start()
        connections[private].close()
    archive(private, folder)
    assert_exact(private, folder)


OPTIONS = Options(url="sqlite:////nowhere")


def _fail(error):
    def fail(*_, **__):
        raise error

    return fail
