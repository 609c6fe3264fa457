"""``manage.py outbox_prune`` removes rows that were kept long enough, and no younger ones."""

from __future__ import annotations

from datetime import timedelta
from io import StringIO

import pytest
from django.core.management import CommandError, call_command
from django.db import connections
from django.test.utils import CaptureQueriesContext

from outbox_app import idempotent
from outbox_app.database.clock import DatabaseNow
from outbox_app.exceptions import InvalidArgument
from outbox_app.models import InboxEntry, Incident
from outbox_app.process import foreground
from outbox_app.retention import prune as prune_rows
from outbox_app.retention.rows import _batches, database_time
from tests.jobs.inbox.worker import deliver, effect

pytestmark = pytest.mark.django_db


@pytest.fixture
def kept(alias):
    """Fill both tables with rows of the given ages in days; read the ages that are left."""

    class Kept:
        def fill(self, *days: float) -> None:
            for age in days:
                InboxEntry.objects.using(alias).create(job_id=f"{age}", task="work")
                Incident.objects.using(alias).create(
                    kind=Incident.Kind.UNKNOWN, first_id=1, last_id=1, detail=f"{age}"
                )
                then = DatabaseNow() - timedelta(days=age)
                InboxEntry.objects.using(alias).filter(job_id=f"{age}").update(handled_at=then)
                Incident.objects.using(alias).filter(detail=f"{age}").update(created_at=then)

        @property
        def inbox(self) -> list[float]:
            return sorted(
                float(age) for age in InboxEntry.objects.using(alias).values_list("pk", flat=True)
            )

        @property
        def incidents(self) -> list[float]:
            details = Incident.objects.using(alias).values_list("detail", flat=True)
            return sorted(map(float, details))

    return Kept()


def prune(*arguments: str) -> str:
    output = StringIO()
    call_command("outbox_prune", *arguments, stdout=output)
    return output.getvalue()


def test_what_another_run_has_just_removed_is_not_counted(alias, kept):
    """As by run_outbox beside a cron job: both reported all rows."""
    kept.fill(31, 32, 33)
    counts = []

    def meanwhile(execute, sql, *arguments):
        if sql.startswith("DELETE") and not counts:
            counts.append(0)
            counts.append(prune_rows("inbox", using=alias))
        return execute(sql, *arguments)

    with connections[alias].execute_wrapper(meanwhile):
        counts.append(prune_rows("inbox", using=alias))
    assert counts == [0, 3, 0]
    assert kept.inbox == []


def test_by_default_the_settings_say_how_long(alias, settings, kept):
    settings.OUTBOX = {**settings.OUTBOX, "INCIDENT_RETENTION_DAYS": 60}
    kept.fill(0, 29.9, 30.1, 59.9, 60.1)

    said = prune("--inbox", "--incidents")

    assert kept.inbox == [0, 29.9]
    assert kept.incidents == [0, 29.9, 30.1, 59.9]
    assert f"pruned inbox removed=3 older_than=30d database={alias} " in said
    assert f"pruned incidents removed=1 older_than=60d database={alias} " in said


def test_a_dry_run_counts_and_removes_nothing(alias, kept):
    kept.fill(0, 29.9, 30.1, 59.9, 60.1)
    said = prune("--inbox", "--incidents", "--batch-size", "2", "--dry-run")
    assert kept.inbox == kept.incidents == [0, 29.9, 30.1, 59.9, 60.1]
    assert f"would prune inbox rows=3 older_than=30d database={alias} " in said
    assert f"would prune incidents rows=3 older_than=30d database={alias} " in said
    assert "pruned" not in said
    assert "removed=3" in prune("--inbox", "--batch-size", "2")


@pytest.mark.parametrize("what", ["inbox", "incidents"])
def test_only_what_is_named_is_pruned(alias, settings, kept, what):
    settings.OUTBOX = {"DATABASE": "elsewhere", "INBOX_DATABASE": "elsewhere"}
    kept.fill(0.5, 1.5)

    prune(f"--{what}", "--older-than", "1", "--database", alias)

    assert (kept.inbox == [0.5]) is (what == "inbox")
    assert (kept.incidents == [0.5]) is (what == "incidents")


def test_the_inbox_has_an_alias_of_its_own(alias, settings, kept):
    settings.OUTBOX = {"DATABASE": "elsewhere", "INBOX_DATABASE": alias}
    kept.fill(31)

    prune("--inbox")

    assert kept.inbox == []


def test_an_empty_table_is_fine(alias):
    assert "removed=0" in prune("--inbox", "--incidents")


def test_rows_go_in_batches_oldest_first(alias, kept, django_assert_num_queries):
    kept.fill(*range(31, 38))

    # Are the tables there; the clock; for each batch a SELECT and a DELETE; a last look.
    with django_assert_num_queries(2 + 3 * 2 + 1, connection=connections[alias]):
        assert prune_rows("inbox", batch_size=3, write=lambda line: None) == 7
    assert kept.inbox == []

    rows = Incident.objects.using(alias).order_by("created_at")
    before = database_time(rows) - timedelta(days=30)
    batches = _batches([rows], "created_at", before, 3, dry_run=False)
    assert next(batches)[0] == 3
    assert kept.incidents == [31, 32, 33, 34]


def test_it_tells_how_far_it_is(alias, monkeypatch, kept):
    monkeypatch.setattr(foreground, "PROGRESS_INTERVAL", 1e-9)
    kept.fill(31, 32, 33)
    lines: list[str] = []

    prune_rows("incidents", batch_size=2, write=lines.append)

    assert [line.split(" rate")[0] for line in lines[:-1]] == [
        "pruning incidents removed=2",
        "pruning incidents removed=3",
    ]
    assert "reached=" in lines[0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--inbox, .*--commands, .*--results, --events, --archived DIR, or several"),
        (["--inbox", "--older-than", "0"], "--older-than must be at least 1 day; got 0"),
        (["--inbox", "--older-than", "soon"], "invalid int value"),
        (["--inbox", "--batch-size", "0"], "--batch-size must be from 1 to 10000; got 0"),
        (["--inbox", "--batch-size", "10001"], "--batch-size must be from 1 to 10000; got 10001"),
        (["--inbox", "--database", "x"], "Database 'x': no such alias. Known: default"),
    ],
)
def test_wrong_arguments_are_refused(alias, kept, arguments, message):
    kept.fill(99)

    with pytest.raises(CommandError, match=message) as error:
        prune(*arguments)

    assert error.value.returncode in {1, 2}  # argparse's own errors say 1 when called from Python
    assert kept.inbox == [99]


def test_an_age_beyond_all_time_is_refused_by_the_function_too(alias, kept):
    kept.fill(99)
    with pytest.raises(InvalidArgument, match="at most 365000 days"):
        prune_rows("inbox", older_than=10**9)
    assert kept.inbox == [99]


def test_an_unknown_kind_is_refused_by_the_function():
    with pytest.raises(InvalidArgument, match=r"One of inbox, incidents, .*; got 'events'"):
        prune_rows("events")


@pytest.mark.parametrize("wrong", [["--fences"], ["--events"], ["--archived", "x", "--log", "no"]])
def test_wrong_arguments_of_one_kind_prune_no_other(kept, wrong, alias):
    kept.fill(31)
    with pytest.raises(CommandError, match=r"--database|EVENT_RETENTION_DAYS|'no'"):
        prune("--inbox", *wrong)
    assert kept.inbox == [31]


def test_a_pruned_id_is_forgotten(task, effects, kept, alias):
    @task
    @idempotent
    def work():
        effect("work")

    for _ in range(2):
        deliver(work, "1.5")
    assert effects() == ["work"]
    InboxEntry.objects.using(alias).update(handled_at=DatabaseNow() - timedelta(days=1.5))
    prune("--inbox", "--older-than", "1")

    deliver(work, "1.5")
    assert effects() == ["work", "work"]


def test_a_statement_is_no_longer_for_all_that_went_before(alias, kept):
    kept.fill(*range(40, 60))
    with CaptureQueriesContext(connections[alias]) as statements:
        assert prune_rows("inbox", using=alias, batch_size=1) == 20
    sizes = [len(each["sql"]) for each in statements if each["sql"].startswith("DELETE")]
    assert max(sizes) < 2 * min(sizes)
