"""``manage.py outbox_status``: its output for people and for programs, and its exit codes."""

from __future__ import annotations

import json
import os
import re
import sys
from datetime import timedelta

import pytest
from django.core.management import CommandError, call_command

from outbox_app.database.clock import DatabaseNow
from outbox_app.events.models import Cursor
from outbox_app.models import StagedJob
from tests import forking
from tests.conftest import VARIABLES
from tests.pages import APPS, section
from tests.patience import patience
from tests.servers.mysql import MARIADB


@pytest.fixture
def status(alias, capsys):
    """``status("--max-age", "60")``: the exit code and the output."""

    def run(*arguments):
        try:
            call_command("outbox_status", *arguments)
            code = 0
        except SystemExit as error:
            code = error.code
        return code, capsys.readouterr().out

    return run


def process(*arguments, **variables):
    """The command in a process of its own, as cron runs it."""
    return forking.run(
        [sys.executable, "-m", "django", "outbox_status", *arguments],
        env={**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings", **variables},
        capture_output=True,
        text=True,
        timeout=patience(100),
    )


@pytest.mark.django_db
def test_the_table_of_an_outbox_that_is_fine(alias, status, staged, drainer):
    staged(2, age=90)
    drainer(shards=128, silent=1)
    code, text = status()
    assert code == 0
    lines = text.splitlines()
    assert lines[:2] == [f"Outbox on database {alias!r}: fine", ""]
    assert re.fullmatch(r"ready       2, the oldest 1 min old", lines[2])
    assert lines[3] == "held        0 due now, 0 within the hour, 0 later"
    assert lines[4] == "per minute  0 published, 0 dead in the last full minute"
    assert lines[5:8] == [
        "dead        0",
        "incidents   none in 24 hours",
        "drainers    1 alive, 0 unowned shards",
    ]
    assert re.fullmatch(r"  web-1:7 +128 shards +0/min  heartbeat [\d.]+ s ago", lines[8])
    assert len(lines) == 9


@pytest.mark.django_db(transaction=True)
def test_the_table_of_an_outbox_in_trouble(
    alias, status, staged, died, drainer, published, run, seen_by
):
    seen_by("stock")
    published("a")
    run("stock")
    published("a", "b")
    Cursor.objects.using(alias).update(error="ValueError: no \x1b[31m")
    staged(1, age=3 * 3600 + 60)
    died(2, error="E")
    died(3, error="F")
    drainer(silent=600, host="web\x1b1", trouble="BrokerUnavailable: \x1b[2J\naway")
    code, text = status("--max-dead", "4", "--max-age", "60")
    assert code == 1
    lines = text.splitlines()
    assert lines[0] == f"Outbox on database {alias!r}: 4 PROBLEMS"
    assert lines[1:3] == [
        "  ! 1 job is waiting and no drainer is running.",
        r"    web\x1b1:7: silent beyond its lease",
    ]
    assert lines[3] == "    Start manage.py drain_outbox."
    assert lines[4:6] == [
        "  ! 1 subscription is failing.",
        r"    stock: ValueError: no \x1b[31m",
    ]
    assert re.fullmatch(r"  ! The oldest ready job is \d+\.\d s old; the limit is 60 s\.", lines[7])
    assert lines[9] == "  ! 5 dead jobs; the limit is 4."
    assert lines[11:13] == ["", "ready       1, the oldest 3 h 1 min old"]
    assert "dead        5: 3 F, 2 E" in lines
    assert "drainers    0 alive, 128 unowned shards" in lines
    told = (
        r"web\\x1b1:7 .* heartbeat 10 min ago  SILENT  TROUBLE: BrokerUnavailable: \\x1b\[2J away"
    )
    assert re.search(told, text)
    assert re.search(r"^  stock +failing    2 behind, the oldest .* s old$", text, re.MULTILINE)
    assert lines[-1] == "gaps        0 open"


@pytest.mark.django_db
def test_an_error_is_named_once(alias, status, staged, drainer):
    """A drainer that is silent has another problem: its line says which trouble it had."""
    staged(1)
    for pid in (7, 8):
        drainer(shards=64, pid=pid, trouble="BrokerUnavailable: away")
    text = status()[1]
    lines = text.splitlines()
    assert lines[2] == "    web-1:7, web-1:8: BrokerUnavailable: away"
    assert text.count("BrokerUnavailable") == 1
    assert [line.split()[-1] for line in lines[-2:]] == ["TROUBLE", "TROUBLE"]


@pytest.mark.django_db
def test_exit_codes_of_limits(alias, status, staged, died, drainer):
    drainer(shards=128)
    staged(3, age=100)
    died(2)
    for fine, beyond in (
        (("--max-age", "1000"), ("--max-age", "50.5")),
        (("--max-backlog", "3"), ("--max-backlog", "2")),
        (("--max-dead", "2"), ("--max-dead", "0")),
    ):
        assert status(*fine)[0] == 0
        code, text = status(*beyond)
        assert (code, text.splitlines()[0]) == (1, f"Outbox on database {alias!r}: 1 PROBLEM")
    held = StagedJob.objects.using(alias)
    held.update(available_at=DatabaseNow() + timedelta(hours=2))
    assert status("--max-age", "50", "--max-backlog", "0")[0] == 0


@pytest.mark.django_db
def test_json_says_all_of_it_and_its_keys_are_documented(alias, status, staged, died, drainer):
    staged(1, age=5)
    died(1, error="E")
    drainer(trouble="away", done=7)
    code, text = status("--json", "--max-dead", "0")
    told = json.loads(text)
    assert code == 1
    assert (told["database"], told["ok"]) == (alias, False)
    assert [each["code"] for each in told["problems"]] == ["trouble", "max_dead"]
    assert told["backlog"]["jobs"] == 1
    assert told["dead"] == {"jobs": 1, "complete": True, "by_error": {"E": 1}}
    assert (told["drainers"][0]["published"], told["drainers"][0]["trouble"]) == (7, "away")
    sections = "\n".join(section(app, "outbox_status") for app in APPS)
    assert set(re.findall(r"^\| `([a-z_]+)` \| ", sections, re.MULTILINE)) == set(told)
    died(1)
    assert json.loads(status("--json")[1])["ok"] is False


@pytest.mark.django_db
def test_json_of_one_that_is_fine(alias, status, drainer):
    drainer(shards=128)
    code, text = status("--json", "--max-age", "0")
    assert (code, json.loads(text)["ok"], json.loads(text)["problems"]) == (0, True, [])


@pytest.mark.django_db
def test_the_database_may_be_named(alias, status, settings, drainer):
    drainer(shards=128)
    settings.OUTBOX = {**settings.OUTBOX, "DATABASE": "nowhere"}
    code, text = status("--database", alias)
    assert (code, text.splitlines()[0]) == (0, f"Outbox on database {alias!r}: fine")


@pytest.mark.parametrize(
    "arguments",
    [
        ("--max-age", "soon"),
        ("--max-age", "-1"),
        ("--max-age", "nan"),
        ("--max-backlog", "1.5"),
        ("--max-backlog", "100001"),
        ("--max-dead", "-1"),
        ("--unknown",),
    ],
)
def test_bad_values_are_refused(arguments):
    done = process(*arguments)
    assert done.returncode == 2
    assert arguments[0] in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout


def test_an_unknown_alias_is_refused():
    with pytest.raises(CommandError, match=r"no such alias\. Known: default") as caught:
        call_command("outbox_status", "--database", "nowhere")
    assert caught.value.returncode == 2


@pytest.mark.parametrize(
    ("database", "variables"),
    [
        pytest.param("default", {"SQLITE_FILE": "/nowhere/at/all"}, id="sqlite"),
        pytest.param(
            "postgres", {"POSTGRES_URL": "postgres://u:hunter2@127.0.0.1:1/d"}, id="postgres"
        ),
        pytest.param(
            "mariadb", {VARIABLES[MARIADB]: "mysql://u:hunter2@127.0.0.1:1/d"}, id="mariadb"
        ),
    ],
)
def test_a_database_that_is_away_is_one_sentence(database, variables):
    for arguments in ((), ("--json",)):
        done = process(*arguments, OUTBOX_ALIAS=database, **variables)
        assert done.returncode == 2
        assert done.stderr.startswith(f"CommandError: Database {database!r} cannot be queried: ")
        assert len(done.stderr.splitlines()) == 1
        assert "hunter2" not in done.stderr
        assert not done.stdout


@pytest.mark.parametrize("outbox", [{"UNKNOWN": 1}, "no dictionary"])
def test_wrong_settings_are_one_sentence(settings, outbox):
    settings.OUTBOX = outbox
    with pytest.raises(CommandError, match="The setting OUTBOX ") as caught:
        call_command("outbox_status")
    assert caught.value.returncode == 2


def test_missing_tables_are_told(tmp_path):
    done = process(OUTBOX_ALIAS="default", SQLITE_FILE=str(tmp_path / "new.sqlite3"))
    assert done.returncode == 2
    assert "manage.py migrate outbox_app" in done.stderr


def test_help_teaches():
    done = process("--help")
    assert done.returncode == 0
    assert "manage.py outbox_status --max-age 60 --max-dead 0" in done.stdout
    assert "Exit codes: 0 fine" in done.stdout
