"""Each commit says what the days have of which the log has rows, and the audit compares it."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from outbox_app.events import prune_events
from outbox_app.events.models import Event
from outbox_app.pipeline.archive_reader import check_files
from outbox_app.pipeline.exceptions import ArchiveRefused
from outbox_app.pipeline.mark import Mark, added
from outbox_app.pipeline.offset import Offset
from outbox_app.pipeline.parquet import File, content_sum
from outbox_app.pipeline.table import Archive
from tests.faults.tools import on

from .harness import archive, publish_some
from .local_context import LocalContext

LOG = "outbox_event"
END = Offset(LOG, "db", 1, "1", "{}")
DAYS = ("2026-01-30", "2026-01-31", "2026-02-01")


def file(day, rows, total):
    return File(f"recorded_date={day}/0-x-{'0' * 32}.parquet", rows, 1, 1, 2, sum=total)


def test_days_grow_and_leave_with_the_log():
    first, second, third = DAYS
    mark = Mark(LOG, END.text).after([file(first, 2, 10), file(second, 1, 2**128 - 1)], END, "", [])
    assert mark.days == {first: [2, "a"], second: [1, "f" * 32]}
    assert (mark.batches, mark.rows) == (1, 3)
    mark = mark.after([file(second, 2, 3)], END, first, [first, second])
    assert mark.days == {first: [2, "a"], second: [3, "2"]}
    mark = mark.after([file(third, 1, 5), file(third, 1, 6)], END, second, [first, second])
    assert mark.days == {second: [3, "2"], third: [2, "b"]}
    # The sum of a day that has left is not known any more.
    late = mark.after([file(first, 1, 1)], END, first, DAYS)
    assert late.days == mark.days
    assert late.rows == mark.rows + 1
    assert added([1, "ff"], 1, 1) == [2, "100"]


def days_of(folder):
    table, found = Archive.load(folder, LOG), {}
    for each in table.files():
        rows, total = each.rows, content_sum(table.read(each))
        found[each.day] = added(found.get(each.day, [0, "0"]), rows, total)
    return found


@pytest.mark.django_db(transaction=True)
def test_each_commit_has_the_days_of_the_log(alias, new_log, tmp_path, monkeypatch):
    monkeypatch.setattr("outbox_app.pipeline.compaction.FILES", 3)
    folder = str(tmp_path / "archive")
    ids = publish_some(alias, 12)
    rows = Event.objects.using(alias)
    for n in range(3):
        moment = datetime(2026, 1, 1, 12, tzinfo=UTC) + timedelta(days=10 * n)
        rows.filter(pk__in=ids[4 * n : 4 * n + 4]).update(recorded_at=moment)
    archive(alias, folder, rows=1)
    table = Archive.load(folder, LOG)
    assert len(table.files()) < 12
    assert table.mark.days == days_of(folder)
    assert list(table.mark.days) == ["2026-01-01", "2026-01-11", "2026-01-21"]
    rows.filter(pk=ids[4]).delete()
    assert prune_events(using=alias, log=LOG, older_than=1, archive=folder, batch_size=5) == 11
    today = f"{datetime.now(UTC):%Y-%m-%d}"
    publish_some(alias, 1)
    archive(alias, folder)
    assert [day for day in Archive.load(folder, LOG).mark.days if day < today] == []


@pytest.mark.django_db(transaction=True)
@on("default")
def test_the_audit_finds_a_day_that_has_other_rows(alias, new_log, tmp_path):
    folder = str(tmp_path / "archive")
    publish_some(alias, 6)
    archive(alias, folder)
    check_files(LocalContext(), Archive.load(folder, LOG))
    newest = max(Path(folder, "_delta_log").glob("0*.json"))
    text = newest.read_text()
    [first, *_] = text.splitlines()
    days = json.loads(first)["commitInfo"]["outbox"]["days"]
    [(day, (rows, total))] = days.items()
    for other in ([rows, "1f"], [rows + 1, total]):
        newest.write_text(text.replace(json.dumps(days[day]).replace(" ", ""), json.dumps(other)))
        with pytest.raises(ArchiveRefused, match=rf"its files of {day} have \[6, '\w+'\]"):
            check_files(LocalContext(), Archive.load(folder, LOG))
    newest.write_text(text)
    check_files(LocalContext(), Archive.load(folder, LOG))
