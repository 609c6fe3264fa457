"""``outbox_pipeline audit`` and ``statistics``, from the log to their results."""

from __future__ import annotations

from collections.abc import Callable
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
from django.core.management import CommandError, call_command
from django.db import ProgrammingError, connections, transaction
from pyarrow import parquet

from outbox_app.events import publish
from outbox_app.events.models import Event, Gap, StreamHead
from outbox_app.models import InboxEntry
from outbox_app.pipeline.driver import run
from outbox_app.pipeline.offset import Offsets
from outbox_app.pipeline.table import Archive
from tests.emptying import cut_off
from tests.faults.tools import on
from tests.servers.mysql import MARIADB

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("new_log", "spark"),
    pytest.mark.timeout(300),
]

Call = Callable[..., str]


@pytest.fixture
def call(alias: str, tmp_path: Path) -> Call:
    """``call("audit", …)``: run a pipeline; return its output."""
    password = tmp_path / "password"
    password.write_text(str(connections[alias].settings_dict.get("PASSWORD") or ""))

    def run(*arguments: str) -> str:
        output = StringIO()
        options = ["--database", alias, "--password-file", str(password)]
        call_command("outbox_pipeline", *arguments, *options, stdout=output)
        return output.getvalue()

    return run


@pytest.fixture
def events(alias: str, settings: Any) -> list[Event]:
    """Three streams of four events."""
    settings.OUTBOX = {**settings.OUTBOX, "OUTSIDE": "stage"}
    for number in range(12):
        publish(f"order-{number % 3}", "order.placed", {"n": number})
    return list(Event.objects.using(alias).order_by("id"))


@on("postgres")
def test_from_an_archive_to_an_audit_and_what_it_finds(
    alias: str, call: Call, events: list[Event], tmp_path: Path
) -> None:
    archive, report = str(tmp_path / "archive"), tmp_path / "audit.html"
    assert "archived=12" in call("archive", "--to", archive, "--max-rows-per-batch=5")
    publish("order-0", "order.paid", {})
    said = call("audit", "--archive", archive, "--report", str(report))
    assert "events=13 streams=3 defects=0" in said
    assert "Sound" in report.read_text()

    rows = Event.objects.using(alias)
    rows.filter(stream="order-1", version=2).delete()
    rows.filter(stream="order-0", version=5).delete()
    with pytest.raises(CommandError, match="has found 2 defects") as found:
        call("audit", "--archive", archive)
    assert found.value.returncode == 1
    gaps = Gap.objects.using(alias).values_list("stream", "first", "last", "subscription")
    assert list(gaps) == [("order-0", 5, 5, "")]  # the other one the archive has

    rows.bulk_create([event for event in events if event.stream == "order-1"][1:2])
    StreamHead.objects.using(alias).filter(stream="order-0").update(version=4)
    publish("order-0", "order.paid", {})
    call("audit", "--archive", archive)
    assert Gap.objects.using(alias).get().state == Gap.State.FILLED


@on("default")
def test_an_archive_that_has_rotted_cannot_be_audited(
    call: Call, events: list[Event], tmp_path: Path
) -> None:
    archive = tmp_path / "archive"
    call("archive", "--to", str(archive))
    [file, *_] = Archive.load(str(archive), "outbox_event").files()
    content = bytearray((archive / file.name).read_bytes())
    content[len(content) // 2] ^= 1
    (archive / file.name).write_bytes(content)
    with pytest.raises(CommandError, match="damaged") as refused:
        call("audit", "--archive", str(archive))
    assert refused.value.returncode == 2
    assert file.name in str(refused.value)


@on("default")
def test_a_pruned_log(alias: str, call: Call, events: list[Event], tmp_path: Path) -> None:
    archive = str(tmp_path / "archive")
    call("archive", "--to", archive)
    Event.objects.using(alias).filter(pk__lte=events[4].pk).delete()
    assert "defects=0" in call("audit", "--archive", archive)
    assert "defects=0" in call("audit", "--pruned")
    with pytest.raises(CommandError, match="3 defects"):
        call("audit")
    gaps = Gap.objects.using(alias)
    assert [gap.state for gap in gaps.all()] == ["open"] * 3
    assert "filled=3" in call("audit", "--archive", archive)  # it has what was pruned
    assert [gap.state for gap in gaps.all()] == ["filled"] * 3


@on("default")
def test_a_gap_stays_open_while_only_the_archive_has_its_versions(
    alias: str, call: Call, events: list[Event], tmp_path: Path
) -> None:
    archive = str(tmp_path / "archive")
    call("archive", "--to", archive)
    lost = Event.objects.using(alias).get(stream="order-1", version=2)
    Event.objects.using(alias).filter(pk=lost.pk).delete()
    for arguments in ([], ["--archive", archive], ["--archive", archive, "--pruned"]):
        with pytest.raises(CommandError, match="has found 1 defect"):
            call("audit", *arguments)
        assert Gap.objects.using(alias).get().state == Gap.State.OPEN


@on("default")
def test_what_was_not_judged_is_not_settled(
    alias: str, call: Call, events: list[Event], tmp_path: Path
) -> None:
    archive = str(tmp_path / "archive")
    Event.objects.using(alias).filter(pk__lte=events[2].pk).delete()
    with pytest.raises(CommandError, match="3 defects"):
        call("audit")
    call("archive", "--to", archive)
    assert "defects=0" in call("audit", "--archive", archive, "--pruned")
    assert [gap.state for gap in Gap.objects.using(alias).all()] == ["open"] * 3


@on("default")
def test_a_report_that_cannot_be_written_is_refused_first(
    call: Call, events: list[Event], tmp_path: Path
) -> None:
    with pytest.raises(CommandError, match=f"{tmp_path} is a folder"):
        call("audit", "--report", str(tmp_path))
    with pytest.raises(CommandError, match="there is no folder /nowhere") as refused:
        call("audit", "--report", "/nowhere/audit.html")
    assert refused.value.returncode == 2


@on("postgres")
def test_statistics(alias: str, call: Call, events: list[Event], tmp_path: Path) -> None:
    InboxEntry.objects.using(alias).create(job_id=str(events[0].message_id), task="tasks.mail")
    said = call("statistics", "--to", str(tmp_path / "figures"))
    file = tmp_path / "figures" / "statistics.parquet"
    assert said == f"statistics log=outbox_event file={file}\n"
    rows = parquet.read_table(file).to_pylist()
    of = {(row["name"], row["dimension"], row["label"]): row["value"] for row in rows}
    assert sum(v for (name, by, _), v in of.items() if (name, by) == ("events", "type")) == 12
    assert of["handled_events", "type", "order.placed"] == 1
    assert of["unmatched_events", "type", "order.placed"] == 11


@on("mariadb")
def test_statistics_of_times_without_a_zone_have_the_minutes_of_the_events(
    alias: str, call: Call, events: list[Event], settings: Any, tmp_path: Path
) -> None:
    times = Event.objects.using(alias).values_list("recorded_at", flat=True)
    expected = {time.replace(second=0, microsecond=0) for time in times}
    settings.USE_TZ, settings.TIME_ZONE = False, "Asia/Kolkata"
    call("statistics", "--to", str(tmp_path))
    figures = parquet.read_table(tmp_path / "statistics.parquet").to_pylist()
    assert {each["minute"] for each in figures if each["name"] == "events"} == expected


@on("default")
def test_statistics_have_to_go_somewhere(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(run, "statistics", None)  # nothing is counted
    with pytest.raises(CommandError, match="File exists"):
        call("statistics", "--to", str(tmp_path / "file"))
    with pytest.raises(CommandError, match="required: --to"):
        call("statistics")
    with pytest.raises(CommandError, match="--to is empty"):
        call("statistics", "--to", "")
    with pytest.raises(CommandError, match="a folder of this machine"):
        call("statistics", "--to", "s3://bucket/figures")
    for number in (-1, 0, 1025):
        with pytest.raises(CommandError, match="--partitions must be from 1 to 1024"):
            call("statistics", "--to=figures", f"--partitions={number}")


@on("postgres", "mariadb")
def test_a_connection_that_is_lost_is_no_finding(
    alias: str, call: Call, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exit code 1 would say that there are defects."""
    kill = "SELECT pg_terminate_backend(pg_backend_pid())"
    if alias == MARIADB:
        kill = "KILL CONNECTION_ID()"
    monkeypatch.setattr(Offsets, "end", lambda self, start: self.database.run(kill, []))
    with pytest.raises(
        CommandError, match=r"OperationalError: .*(terminat|kill|interrupt)"
    ) as lost:
        call("audit")
    assert lost.value.returncode == 2
    assert "\n" not in str(lost.value)


@on("postgres", "mariadb")
def test_connections_that_are_idle_for_long_are_cut_off(
    alias: str, call: Call, events: list[Event], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An audit may take hours: what it has found is written all the same."""
    Event.objects.using(alias).filter(pk=events[4].pk).delete()
    audit = run.audit

    def audited(*arguments: Any, **options: Any) -> Any:
        cut_off(alias)
        result = audit(*arguments, **options)
        cut_off(alias)
        return result

    monkeypatch.setattr(run, "audit", audited)
    with pytest.raises(CommandError, match="has found 1 defect"):
        call("audit", "--pruned")
    assert Gap.objects.using(alias).get().first == events[4].version


@on("default")
def test_a_database_that_there_is_not_is_refused(alias: str) -> None:
    with pytest.raises(CommandError, match=r"'nowhere': no such alias\. Known: default") as refused:
        call_command("outbox_pipeline", "audit", "--database", "nowhere")
    assert refused.value.returncode == 2


@on("default")
def test_gaps_that_cannot_be_written_are_no_finding(
    alias: str, call: Call, events: list[Event]
) -> None:
    def refuse(execute: Any, sql: str, *others: Any) -> Any:
        if "outbox_gap" in sql:
            raise ProgrammingError("permission denied for table outbox_gap")
        return execute(sql, *others)

    says = "ProgrammingError: permission denied"
    with (
        connections[alias].execute_wrapper(refuse),
        pytest.raises(CommandError, match=says) as refused,
    ):
        call("audit")
    assert refused.value.returncode == 2


@on("postgres")
def test_the_transaction_around_it_stands(alias: str, call: Call) -> None:
    with transaction.atomic(using=alias):
        InboxEntry.objects.using(alias).create(job_id="a", task="t")
        call("audit")
    assert InboxEntry.objects.using(alias).filter(job_id="a").exists()


@on("mariadb")
def test_a_session_that_runs_already_is_not_given_a_password_by_us(alias: str) -> None:
    with pytest.raises(CommandError, match="--password-file") as refused:
        call_command("outbox_pipeline", "audit", "--database", alias)
    assert refused.value.returncode == 2
