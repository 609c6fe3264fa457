"""Every command, with hostile rows and arguments: its output is safe to read on a terminal."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from io import StringIO
from typing import Any
from uuid import uuid4

import pytest
from django.core.management import CommandError, call_command, get_commands, load_command_class
from django.db import transaction
from django.db.models import QuerySet
from django.test.utils import override_system_checks

from outbox_app.database.clock import DatabaseNow
from outbox_app.events import publish, subscriber
from outbox_app.events.log.reader import LogReader
from outbox_app.events.models import Cursor, Event, Gap, ParkedStream, Subscription
from outbox_app.management.base import OutboxCommand
from outbox_app.models import DeadJob, Incident, Process, StagedJob
from tests.entities.models import Account
from tests.jobs.dead.rows import dead_jobs, staged_jobs

from .conftest import HOSTILE, assert_harmless

pytestmark = pytest.mark.django_db(transaction=True)

DAY = timedelta(days=1)
Run = Callable[..., str]


@pytest.fixture
def run(alias: str, logged: StringIO) -> Run:
    """``run("outbox_dead", "list", times=1)``: the output of the command and its loggers.

    ``times``: how often the output must contain the hostile text, escaped.
    """

    def make(name: str, *arguments: str, times: int = 0) -> str:
        out = StringIO()
        try:
            call_command(name, *arguments, stdout=out)
        except CommandError as error:
            out.write(f"\n{error}")
        except SystemExit:
            pass
        written = out.getvalue() + logged.getvalue()
        assert_harmless(written, times=times)
        return written

    return make


@pytest.fixture
def rows(alias: str) -> None:
    """Hostile text in every column that the commands show."""
    dead_jobs(using=alias, task=HOSTILE, error=HOSTILE, reason=HOSTILE, queue=HOSTILE)
    subscription = {"subscription": HOSTILE, "log": "outbox_event"}
    with transaction.atomic(using=alias):
        publish(HOSTILE, HOSTILE, topic=HOSTILE)
    state = LogReader(Event, using=alias).window.start(0)
    for row in (
        Process(id=uuid4(), host=HOSTILE, pid=7, lease_seconds=10, trouble=HOSTILE),
        Incident(kind="unknown", first_id=1, last_id=1, drainer=HOSTILE, detail=HOSTILE),
        Subscription(name=HOSTILE),
        Cursor(**subscription, partition=0, state=state.dump(), error=HOSTILE, failures=1),
        ParkedStream(**subscription, partition=0, stream=HOSTILE, version=2, position=0,
                     error=HOSTILE),
        Gap(id=7, kind="version", **subscription, stream=HOSTILE, first=2, last=2),
    ):  # fmt: skip
        row.save(using=alias, force_insert=True)


def test_the_status(alias: str, run: Run, rows: None) -> None:
    assert "FORGED" in run("outbox_status")
    shown = StringIO()
    with pytest.raises(SystemExit):
        call_command("outbox_status", "--json", stdout=shown)
    assert_harmless(shown.getvalue())
    assert HOSTILE in {each["name"] for each in json.loads(shown.getvalue())["subscriptions"]}


def test_dead_jobs(alias: str, run: Run, rows: None) -> None:
    run("outbox_dead", "list")
    run("outbox_dead", "requeue", "--task", HOSTILE)
    dead_jobs(using=alias, task=HOSTILE)
    run("outbox_dead", "discard", "--task", HOSTILE)
    assert not DeadJob.objects.using(alias).exists()


def test_subscriptions(alias: str, run: Run, rows: None) -> None:
    for arguments in (
        ("list",),
        ("list", "--json"),
        ("gaps",),
        ("skip-gap", "7", "--reason", HOSTILE),
        ("pause", HOSTILE),
        ("resume", HOSTILE),
        ("replay", HOSTILE, "--from", "beginning", "--dry-run"),
        ("replay", HOSTILE, "--from", HOSTILE),
        ("replay", HOSTILE, "--from", "now", "--log", HOSTILE),
        ("release", HOSTILE, "--stream", HOSTILE),
        ("repartition", HOSTILE),
        ("forget", HOSTILE),
    ):
        assert "FORGED" in run("outbox_subscriptions", *arguments, "--database", alias)


def test_a_drainer_and_its_log(alias: str, run: Run, make_app: Callable[..., Any]) -> None:
    make_app()  # one that is loaded: the job belongs to another
    staged_jobs(using=alias, app=HOSTILE, task=HOSTILE, task_id=HOSTILE)
    run("drain_outbox", "--once", times=2)
    assert not StagedJob.objects.using(alias).exists()


def test_a_handler_that_fails(alias: str, run: Run) -> None:
    @subscriber("stopped")
    def stop(events: list[Any]) -> None:
        raise ValueError(HOSTILE)

    with transaction.atomic(using=alias):
        publish(HOSTILE, HOSTILE)
    run("run_subscriptions", "--once", "stopped", times=1)


def test_a_prune_and_what_holds_it(alias: str, run: Run, rows: None) -> None:
    Event.objects.using(alias).update(recorded_at=DatabaseNow() - DAY * 9)
    run("outbox_prune", "--events", "--older-than", "1", times=1)
    run("outbox_prune", "--events", "--older-than", "1", "--log", HOSTILE)


@pytest.mark.parametrize("alias", ["default"])
def test_an_argument_that_is_refused(run: Run) -> None:
    for name, *arguments in (
        ("outbox_rebase", "--log", HOSTILE),
        ("outbox_rebuild", HOSTILE),
        ("outbox_pipeline", "audit", "--log", HOSTILE),
        ("outbox_pipeline", "rebuild", HOSTILE),
        ("run_subscriptions", HOSTILE),
        ("drain_outbox", "--database", HOSTILE),
        ("outbox_status", "--database", HOSTILE),
        ("outbox_dead", "list", "--database", HOSTILE),
        ("outbox_prune", "--inbox", "--database", HOSTILE),
        ("outbox_prepared", "answer", HOSTILE),
        ("outbox_entities", "erase", "account", HOSTILE, "--reason", "why", "--no-input"),
    ):
        assert "FORGED" in run(name, *arguments)


def test_entities(alias: str, run: Run) -> None:
    arguments = {"owner": HOSTILE}
    Account.execute(HOSTILE, "open", arguments, command_id=HOSTILE, using=alias)
    QuerySet(Account, using=alias).delete()
    run("outbox_entities", "verify", times=1)
    erase = ("erase", "account", HOSTILE, "--reason", HOSTILE, "--no-input")
    assert "FORGED" in run("outbox_entities", *erase)


def test_a_damaged_cursor_is_named(alias: str, run: Run, rows: None) -> None:
    Cursor.objects.using(alias).update(state=HOSTILE)
    run("outbox_rebase", times=1)


def test_every_command_writes_through_one_place() -> None:
    ours = [name for name, app in get_commands().items() if app.startswith("outbox_app")]
    assert len(ours) >= 10
    for name in ours:
        assert isinstance(load_command_class(get_commands()[name], name), OutboxCommand), name


def test_the_checks_of_a_command_ask_no_database(alias: str) -> None:
    """Nor does Django 6.1: a drainer begins while a database is away that it does not use."""
    asked: list[Any] = []

    def check(databases: Any, **kwargs: Any) -> list[Any]:
        asked.append(databases)
        return []

    with override_system_checks([check]):
        call_command("outbox_dead", "list", database=alias, skip_checks=False)
    assert asked == [[]]


def test_an_error_keeps_its_colour(monkeypatch: pytest.MonkeyPatch) -> None:
    """Django colours the error of a command: those codes are its own, and stay."""

    class Terminal(StringIO):
        def isatty(self) -> bool:
            return True

    class Refusing(OutboxCommand):
        def handle(self, **options: Any) -> None:
            raise CommandError(HOSTILE)

    out = Terminal()
    command = Refusing(stderr=out, force_color=True)  # type: ignore[arg-type]
    with pytest.raises(SystemExit):
        command.run_from_argv(["manage.py", "refusing", "--force-color", "--skip-checks"])
    assert out.getvalue().startswith("\x1b[")
    assert_harmless(out.getvalue().replace("\x1b[31;1m", "").replace("\x1b[0m", ""), times=1)


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            [name, "--database="]
            for name in (
                "drain_outbox",
                "outbox_shadow",
                "outbox_status",
                "run_outbox",
                "run_prepared",
                "run_subscriptions",
            )
        ),
        ["outbox_dead", "discard", "--key="],
        ["outbox_entities", "verify", "--repair", "--database="],
        ["outbox_entities", "erase", "", "a", "--reason=why", "--no-input"],
        ["outbox_pipeline", "archive", "--to="],
        ["outbox_pipeline", "audit", "--archive="],
        ["outbox_prune", "--archived="],
        ["outbox_rebase", "--log="],
        ["outbox_subscriptions", "replay", "a", "--from=beginning", "--log="],
    ],
)
def test_an_empty_argument_is_not_taken_for_all(arguments: list[str]) -> None:
    """As where a script's variable is not set."""
    with pytest.raises(CommandError, match=r"is empty|no entity type ''") as raised:
        call_command(*arguments)
    assert raised.value.returncode == 2


def test_times_are_in_the_zone_of_the_project(alias: str, run: Run, settings: Any) -> None:
    """As in the admin, and as ``replay --from`` takes them: one zone, whichever the command."""
    settings.TIME_ZONE = "Asia/Kathmandu"
    moment = datetime(2026, 1, 31, 12, tzinfo=UTC)
    dead_jobs(using=alias)
    gap = {"subscription": "shop", "log": "outbox_event", "stream": "order-17"}
    Gap.objects.using(alias).create(kind="version", first=3, last=3, **gap)
    DeadJob.objects.using(alias).update(died_at=moment)
    Gap.objects.using(alias).update(seen_at=moment)
    for arguments, times in (
        (("outbox_dead", "list"), 1),
        (("outbox_subscriptions", "gaps", "--database", alias), 1),
    ):
        assert run(*arguments).count("2026-01-31 17:45:00") == times, arguments


@pytest.mark.parametrize("line", ["outbox_dead list", "outbox_entities verify", "outbox_status"])
def test_ctrl_c_ends_a_command_without_a_word(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the exit code of a shell's; only there: who calls a command is interrupted as ever."""

    def interrupt(*args: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    name, *arguments = line.split()
    command = load_command_class(get_commands()[name], name)
    assert isinstance(command, OutboxCommand)
    monkeypatch.setattr(command, "execute", interrupt)
    monkeypatch.setattr(command.stderr, "_out", written := StringIO())
    with pytest.raises(SystemExit) as ended:
        command.run_from_argv(["manage.py", name, *arguments])
    assert ended.value.code == 130
    assert written.getvalue() == ""
