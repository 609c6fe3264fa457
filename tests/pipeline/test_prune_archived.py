"""``outbox_prune --archived DIR`` deletes old events that are archived and passed by all."""

from __future__ import annotations

from datetime import timedelta
from io import StringIO
from pathlib import Path
from uuid import uuid4

import pytest
from deltalake import DeltaTable
from django.core.management import CommandError, call_command
from django.db import transaction

from outbox_app.database.clock import DatabaseNow
from outbox_app.events import publish
from outbox_app.events.log.window import TOMBSTONE
from outbox_app.events.models import Event
from outbox_app.pipeline import compaction
from outbox_app.pipeline.archiver import Archiver
from outbox_app.pipeline.driver import archive_lookup
from outbox_app.pipeline.driver.pipeline import log_options
from outbox_app.pipeline.table import Archive
from tests.docs.test_code_in_docs import ROOT, blocks
from tests.events.log.own_log.models import Ledger
from tests.faults.tools import on
from tests.servers.mysql import MARIADB

from .harness import archive as fill
from .harness import killing, named
from .local_context import LocalContext

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def old(alias, new_log):
    """``old(n)``: publish n events that are ten days old."""

    def make(count: int) -> None:
        before = Event.objects.using(alias).order_by("-pk").values_list("pk", flat=True).first()
        for number in range(count):
            with transaction.atomic(using=alias):
                publish(f"order-{number % 3}", "order.placed", {"n": number})
        rows = Event.objects.using(alias).filter(pk__gt=before or 0)
        rows.update(recorded_at=DatabaseNow() - timedelta(days=10))

    return make


@pytest.fixture
def archive(alias, tmp_path):
    """``archive()``: archive the log as it is now. Returns the folder."""
    folder = str(tmp_path / "archive")

    def run() -> str:
        password = "outbox" if alias == MARIADB else ""
        options = log_options(Event, using=alias, password=password)
        Archiver(LocalContext(), options, folder, max_rows=4).run()
        return folder

    return run


@pytest.fixture
def left(alias):
    """``left()``: the positions left in the log."""
    return lambda: list(Event.objects.using(alias).order_by("pk").values_list("pk", flat=True))


def prune(*arguments: str) -> str:
    output = StringIO()
    call_command("outbox_prune", *arguments, stdout=output)
    return output.getvalue()


def test_what_is_archived_goes_and_the_rest_stays(old, archive, left):
    old(10)
    folder = archive()
    old(5)
    kept = left()[10:]
    arguments = ["--archived", folder, "--older-than=3", "--batch-size=4"]
    said = prune(*arguments, "--dry-run")
    assert "would prune log=outbox_event rows=10 " in said
    assert f"held log=outbox_event by=position {kept[0]}, which is not archived" in said
    assert len(left()) == 15
    said = prune(*arguments)
    assert left() == kept
    assert f"held log=outbox_event by=position {kept[0]}, which is not archived" in said
    assert "removed=10" in said
    archive()
    prune("--archived", folder, "--older-than=3")
    assert left() == []


def test_what_is_young_stays(alias, old, archive, left):
    old(6)
    Event.objects.using(alias).filter(pk=left()[3]).update(recorded_at=DatabaseNow())
    folder, kept = archive(), left()[3:]
    prune("--archived", folder, "--older-than=3")
    assert left() == kept


def test_a_row_that_is_another_one_by_now_stays(alias, old, archive, left):
    old(6)
    folder, changed = archive(), left()[2]
    Event.objects.using(alias).filter(pk=changed).update(message_id=uuid4())
    said = prune("--archived", folder, "--older-than=3")
    assert left()[0] == changed
    assert f"position {changed}, which differs from the archived row in message_id (" in said


def test_a_file_that_has_rotted_is_no_reason_to_delete(old, archive, left):
    old(6)
    folder, kept = archive(), left()
    for file in Archive.load(folder, "outbox_event").files():
        path = Path(folder, file.name)
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    with pytest.raises(CommandError, match="or not as it was written") as refused:
        prune("--archived", folder, "--older-than=3")
    assert refused.value.returncode == 2
    assert left() == kept


@on("default")
def test_an_archive_that_cannot_be_read(old, archive, left):
    """As root reads what it has no right to, there are folders where files should be."""
    old(6)
    folder, kept = archive(), left()
    for path in (Path(folder, named(folder)[0]), Path(folder, "_delta_log", "_last_checkpoint")):
        path.unlink(missing_ok=True)
        path.mkdir()
        with pytest.raises(
            CommandError, match=r"The archive cannot be read: .*irectory"
        ) as refused:
            prune("--archived", folder, "--older-than=3")
        assert refused.value.returncode == 2
        assert str(refused.value).isprintable()
    assert left() == kept


def test_files_that_were_put_together_meanwhile(old, archive, left, monkeypatch):
    """The files are those of the version that was read at the start; they are kept for a week."""
    old(6)
    folder = archive()
    table = Archive.load(folder, "outbox_event")
    first = archive_lookup.ArchiveLookup.first

    def compacted(self, ids, **options):
        monkeypatch.setattr(archive_lookup.ArchiveLookup, "first", first)
        assert [each.rows for each in compaction.compact(table)] == [6]
        return first(self, ids, **options)

    monkeypatch.setattr(compaction, "FILES", 2)
    monkeypatch.setattr(archive_lookup.ArchiveLookup, "first", compacted)
    prune("--archived", folder, "--older-than=3")
    assert left() == []


@on("default")
def test_what_a_killed_compaction_has_left_is_no_lost_batch(old, archive, left, monkeypatch):
    """Its rows are in files that are committed, and they may go from the log."""
    monkeypatch.setattr(compaction, "FILES", 2)
    old(6)
    with killing("compaction_written"):
        archive()
    folder = archive()
    Archive.load(folder, "outbox_event").verify(lambda position: False)
    old(6)
    with killing("compaction_written", 2):
        archive()
    prune("--archived", folder, "--older-than=3")
    archive()
    assert Archive.load(folder, "outbox_event").rows == 12


@on("mariadb")
def test_a_tombstone_holds_nothing_up(alias, old, archive, left):
    old(6)
    sealed = Event.objects.using(alias).filter(pk=left()[1])
    sealed.update(type=TOMBSTONE, stream=TOMBSTONE, topic="")
    folder = archive()
    assert Archive.load(folder, "outbox_event").rows == 5
    prune("--archived", folder, "--older-than=3")
    assert left() == []


@on("default")
def test_no_archive(alias, old, tmp_path, left):
    old(2)
    for arguments in (["--archived", str(tmp_path)], ["--archived", str(tmp_path), "--events"]):
        with pytest.raises(CommandError, match="is no archive") as refused:
            prune(*arguments, "--older-than=3")
        assert refused.value.returncode == 2
    assert len(left()) == 2


@on("default")
def test_the_archive_of_another_log(alias, old, archive, left):
    old(2)
    with pytest.raises(CommandError, match="not of own_log_visit"):
        prune("--archived", archive(), "--log=own_log_visit", "--older-than=3")
    assert len(left()) == 2


def test_a_table_that_somebody_changed_prunes_nothing(alias, old, archive, left):
    old(6)
    folder = archive()
    DeltaTable(folder).delete(f"id = {left()[5]}")
    with pytest.raises(CommandError, match="Another program has changed") as refused:
        prune("--archived", folder, "--older-than=3")
    assert refused.value.returncode == 2
    assert len(left()) == 6


def test_a_log_with_columns_of_its_own(alias, tmp_path):
    """The archive has them all, and what is pruned can be put back as it was."""
    for n in range(3):
        with transaction.atomic(using=alias):
            publish("order-1", "order.placed", {"n": n}, log=Ledger)
    rows = Ledger.objects.using(alias)
    rows.update(recorded_at=DatabaseNow() - timedelta(days=10), note="paid ä")
    before = list(rows.order_by("pk").values())
    folder = str(tmp_path / "archive")
    assert fill(alias, folder, log=Ledger) == 3
    prune("--archived", folder, "--log=ledger", "--older-than=3")
    assert not rows.exists()
    page = {"__name__": "page"}
    for block in blocks(ROOT / "docs" / "howto" / "restore-from-archive.md"):
        exec(block, page)
    lost = page["lost"](folder, first=1, log=Ledger, using=alias)
    assert page["put_back"](lost, log=Ledger, using=alias) == 3
    assert list(rows.order_by("pk").values()) == before
