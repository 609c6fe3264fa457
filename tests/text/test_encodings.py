"""Commands whose output has an encoding that lacks characters, as on an old terminal or in cron."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from django.core.management import get_commands, load_command_class
from django.db import transaction

from outbox_app.events import publish
from outbox_app.events.log.reader import LogReader
from outbox_app.events.models import Cursor, Event, Gap, ParkedStream, Subscription
from tests.jobs.dead.rows import dead_jobs, staged_jobs

ROOT = Path(__file__).resolve().parents[2]
#: Latin-1 has the first letter only; the length makes the commands end it with an ellipsis.
FOREIGN = "ü日本\N{GRINNING FACE}" + "x" * 400
ASCII = {"PYTHONUTF8": "0", "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0"}
LATIN_1 = {"PYTHONIOENCODING": "latin-1"}
OURS = sorted(name for name, app in get_commands().items() if app.startswith("outbox_app"))


@pytest.fixture
def rows(alias: str) -> None:
    """Foreign text in the columns that commands show, and problems that set exit codes."""
    dead_jobs(using=alias, task=FOREIGN[:200], error=FOREIGN[:200], reason=FOREIGN)
    staged_jobs(using=alias, task=FOREIGN[:200])
    with transaction.atomic(using=alias):
        publish(FOREIGN[:50], "made")
    of = {"subscription": FOREIGN[:50], "log": "outbox_event", "partition": 0}
    state = LogReader(Event, using=alias).window.start(0).dump()
    failed = {"position": 1, "type": FOREIGN, "stream": FOREIGN, "version": 1, "traceback": ""}
    for row in (
        Subscription(name=FOREIGN[:50]),
        Cursor(**of, state=state, error=FOREIGN, failures=2, failed_event=failed),
        ParkedStream(**of, stream=FOREIGN[:250], version=2, position=0, error=FOREIGN),
        Gap(kind="version", **of, stream=FOREIGN[:250], first=2, last=2),
    ):
        row.save(using=alias, force_insert=True)


def process(*arguments: str, **variables: str) -> subprocess.CompletedProcess[bytes]:
    """A process whose Python finds the encoding in its environment."""
    command = [sys.executable, "-m", "django", *arguments]
    return subprocess.run(command, cwd=ROOT, env=variables, capture_output=True, check=False)


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("encoding", [ASCII, LATIN_1], ids=["ascii", "latin-1"])
@pytest.mark.parametrize(
    ("command", "code"),
    [
        ("outbox_status", 1),
        ("outbox_status --json", 1),
        ("outbox_dead list", 0),
        ("outbox_subscriptions list", 0),
        ("outbox_subscriptions gaps", 0),
    ],
)
def test_a_process_shows_escapes_and_keeps_its_exit_code(
    alias: str, rows: None, environment: Any, command: str, code: int, encoding: dict[str, str]
) -> None:
    done = process(*command.split(), **environment(alias), **encoding)
    assert done.returncode == code, done.stderr
    if command.endswith("--json"):
        names = {each["name"] for each in json.loads(done.stdout)["subscriptions"]}
        assert FOREIGN[:50] in names
        return
    name = "ü日本\N{GRINNING FACE}"
    shown = name.encode("latin-1" if encoding is LATIN_1 else "ascii", "backslashreplace")
    assert shown in done.stdout
    assert b"\\u2026" in done.stdout


LOGS = """
import django
django.setup()
from outbox_app.management.base import OutboxCommand
from outbox_app.text import get_logger

class Command(OutboxCommand):
    requires_system_checks = []

    def handle(self, **options):
        with self.logging():
            get_logger("outbox_app").info("It is said name=%s", "\\xfc\\u65e5")

Command().run_from_argv(["manage.py", "tell"])
"""


def test_a_log_handler_of_the_same_stream_loses_no_line() -> None:
    names = {"PATH": os.environ["PATH"], "DJANGO_SETTINGS_MODULE": "tests.settings"}
    command = [sys.executable, "-c", LOGS]
    done = subprocess.run(command, cwd=ROOT, env=names | LATIN_1, capture_output=True, check=True)
    assert done.stdout.endswith(b" It is said name=\xfc\\u65e5\n")
    assert b"Logging error" not in done.stderr


@pytest.mark.parametrize("name", OURS)
def test_help_needs_no_more_than_ascii(name: str) -> None:
    parser = load_command_class(get_commands()[name], name).create_parser("manage.py", name)
    assert parser.format_help().isascii()
