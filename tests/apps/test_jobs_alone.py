"""Jobs alone: INSTALLED_APPS has ``outbox_app``, and nothing else of the package is loaded."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import forking
from tests.apps.processes import ROOT, manage, run, variables
from tests.patience import eventually
from tests.servers.processes import forget_process, kill_trees, spawn

pytestmark = pytest.mark.system

COMMANDS = ["drain_outbox", "outbox_dead", "outbox_prune", "outbox_status", "run_outbox"]
TABLES = ["deadjob", "inbox", "incident", "lease", "process", "run", "stagedjob", "statistic"]
ENTRIES = ["Dead jobs", "Incidents", "Overview", "Processes", "Staged jobs"]
#: The rooms of other capabilities.
OTHERS = {
    *("events", "entities", "prepared", "door", "fleet", "ids"),
    *("django_tasks", "shadow", "pipeline", "sharding"),
}
#: What a web server loads: its application, the addresses, the pages of the admin.
SERVER = """
from tests.apps.shop.wsgi import application
from django.urls import get_resolver, reverse
get_resolver().url_patterns
reverse("admin:outbox_app_overview")
"""
MODULES = """
import json, sys
print(json.dumps([name for name in sys.modules if name.startswith("outbox_app.")]))
"""
COMMAND = """
import os, sys
os.environ["DJANGO_COLORS"] = "nocolor"
from django.core.management import execute_from_command_line
try:
    execute_from_command_line(["manage.py", *{command}])
except SystemExit as error:
    assert not error.code, error.code
"""


@pytest.fixture(scope="module")
def row(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What ``tests.apps.shop.row`` found: it stages, drains, lets a job die, shows all pages."""
    folder = tmp_path_factory.mktemp("alone")
    done = run("-m", "tests.apps.shop.row", apps="core", folder=folder, PYTHONWARNINGS="error")
    assert done.returncode == 0, done.stderr
    return dict(json.loads(done.stdout.splitlines()[-1]))


@pytest.fixture
def migrated(tmp_path: Path) -> Path:
    done = manage("migrate", "-v0", apps="core", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    return tmp_path


def others(modules: list[str]) -> set[str]:
    """Return the modules of other capabilities."""
    assert "outbox_app.jobs.staging.sending" in modules
    return {name for name in modules if name.split(".")[1] in OTHERS}


def test_what_it_brings(row: dict[str, Any]) -> None:
    assert row["tables"] == [f"outbox_{name}" for name in TABLES]
    assert row["migrations"] == 1
    assert row["indexes"] == 10
    assert row["permissions"] == 32
    assert row["entries"] == {"outbox_app": ENTRIES}
    assert row["commands"] == COMMANDS


def test_what_it_shows(row: dict[str, Any]) -> None:
    """Its figures and problems are those of jobs, in each place."""
    assert [each["code"] for each in row["health"]["problems"]] == ["no_drainer"]
    assert [each["code"] for each in row["status"]["problems"]] == ["no_drainer"]
    assert {"subscriptions", "gaps", "prepared"}.isdisjoint(row["status"])
    assert "Ready" in row["overview"]
    assert "Subscriptions behind" not in row["overview"]
    assert "outbox_backlog_jobs" in row["metrics"]
    for word in ("subscription", "gaps", "entity", "prepared", "server", "events"):
        assert word not in row["metrics"]


def test_no_module_of_another_capability_after_all_of_that(row: dict[str, Any]) -> None:
    assert others(row["modules"]) == set()


@pytest.mark.parametrize(
    "code",
    [
        pytest.param(SERVER, id="server"),
        *(
            pytest.param(COMMAND.format(command=command.split()), id=command)
            for command in (
                "check --database default",
                "check --deploy --fail-level CRITICAL",
                "drain_outbox --once",
                "run_outbox --once",
                "outbox_prune --inbox --incidents --counters",
                "outbox_dead list",
            )
        ),
    ],
)
def test_no_module_of_another_capability(code: str, migrated: Path) -> None:
    done = run("-c", code + MODULES, apps="core", folder=migrated)
    assert done.returncode == 0, done.stderr
    assert others(json.loads(done.stdout.splitlines()[-1])) == set()


def test_what_the_commands_offer(migrated: Path) -> None:
    said = manage("outbox_prune", "--events", apps="core", folder=migrated).stderr
    assert "unrecognized arguments: --events" in said
    looped = "import django; django.setup(); from outbox_app.supervisor import _loops\n"
    looped += "print([name for name, _ in _loops('default', only=None)])"
    done = run("-c", looped, apps="core", folder=migrated)
    assert done.stdout == "['jobs', 'retention']\n", done.stderr


@pytest.fixture
def worker(migrated: Path) -> Iterator[Callable[[], Any]]:
    """``worker()``: start a worker of the project; its broker is a folder."""
    started: list[Any] = []

    def start() -> Path:
        log = migrated / "worker.log"
        command = "-m celery -A tests.apps.shop worker -P solo --without-gossip --without-mingle"
        process = spawn(
            [sys.executable, *command.split(), "--without-heartbeat"],
            log=log,
            folder=ROOT,
            environment=variables("core", migrated, **broker(migrated)),
            user=None,
            popen=forking.Popen,
        )
        started.append(process)
        return log

    yield start
    for process in started:
        kill_trees([process.pid])
        process.wait()
        forget_process(process.pid)


def broker(folder: Path) -> dict[str, str]:
    messages = folder / "messages"
    messages.mkdir(exist_ok=True)
    return {"SHOP_BROKER": "filesystem://", "SHOP_FOLDER": str(messages)}


def test_no_module_of_another_capability_in_a_worker(migrated: Path, worker: Any) -> None:
    """A task comes to it from the outbox, stages a job, and looks at its process's modules."""
    report = migrated / "report"
    stage = (
        "import django; django.setup()\nfrom django.db import transaction\n"
        "from tests.apps.shop.celery import report\n"
        f"with transaction.atomic(): report.delay({str(report)!r})"
    )
    done = run("-c", stage, apps="core", folder=migrated, **broker(migrated))
    assert done.returncode == 0, done.stderr
    done = manage("drain_outbox", "--once", apps="core", folder=migrated, **broker(migrated))
    assert done.returncode == 0, done.stderr
    log = worker()
    eventually(lambda: report.exists() and report.read_text().endswith("\n"), log.read_text)
    assert others(report.read_text().split()) == set()
