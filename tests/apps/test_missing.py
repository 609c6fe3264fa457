"""An app that is needed and not installed: ``check`` and the first call name the line to add."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.apps.processes import manage, run

pytestmark = pytest.mark.system

#: By installed apps, a call, and the app that it lacks.
CALLS = {
    "publish": ("core", "from outbox_app.events import publish as call", "events"),
    "subscriber": ("core", "from outbox_app.events import subscriber as call", "events"),
    "a log": ("core", "from outbox_app.events.models import EventLog as call", "events"),
    "entities": ("core events", "from outbox_app.entities import Entity as call", "entities"),
    "service": (
        "core events entities",
        "from outbox_app.entities import service as call",
        "door",
    ),
    "prepared": ("core events", "from outbox_app.prepared import prepared as call", "prepared"),
    "fence": ("core", "from outbox_app.prepared import fence as call", "prepared"),
    "keeper": (
        "core events prepared",
        "from outbox_app.prepared import prepare; "
        "call = lambda: prepare('a', 'b', using='business', to='bank')",
        "door",
    ),
    "door": ("core", "from outbox_app.door import client as call", "door"),
    "servers": (
        "core door",
        "from outbox_app.fleet import servers; call = lambda: servers('bank')",
        "fleet",
    ),
    "snowflake": ("core", "from outbox_app.ids import snowflake as call", "ids"),
    "tables": ("core", "from outbox_app.sharding import ShardedTable as call", "ids"),
    "backend": (
        "core",
        "from outbox_app.django_tasks import OutboxBackend as call",
        "django_tasks",
    ),
    "archive": (
        "core events",
        "from outbox_app.events.archives import open_archive; "
        "call = lambda: open_archive('', None, using='')",
        "pipeline",
    ),
}
CALL = """
import django
from django.core.exceptions import ImproperlyConfigured
django.setup()
try:
    {call}
    call()
except ImproperlyConfigured as error:
    print(error)
"""


@pytest.mark.parametrize(("apps", "call", "missing"), CALLS.values(), ids=CALLS)
def test_a_call_names_the_line(apps: str, call: str, missing: str, tmp_path: Path) -> None:
    name = f"outbox_app.{missing}"
    done = run("-c", CALL.format(call=call), apps=apps, folder=tmp_path)
    assert done.stdout == (
        f'INSTALLED_APPS does not have {name}. Add "{name}" to INSTALLED_APPS, and run '
        "manage.py migrate.\n"
    ), done.stderr


@pytest.mark.parametrize(
    ("apps", "needs"),
    [
        ("core entities", "events"),
        ("core prepared", "events"),
        ("core pipeline", "events"),
        ("core fleet", "door"),
        ("events", ""),
        ("ids", ""),
        ("shadow", ""),
        ("django_tasks", ""),
    ],
)
def test_check_names_the_line(apps: str, needs: str, tmp_path: Path) -> None:
    """Nothing else of the app runs, so nothing else fails."""
    app, name = f"outbox_app.{apps.split()[-1]}", f"outbox_app.{needs}".rstrip(".")
    done = manage("check", apps=apps, folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr == (
        "SystemCheckError: System check identified some issues:\n\nERRORS:\n"
        f"?: (outbox.E049) {app} needs {name}, which INSTALLED_APPS does not have.\n"
        f'\tHINT: Add "{name}" to INSTALLED_APPS, and run manage.py migrate.\n\n'
        "System check identified 1 issue (0 silenced).\n"
    )
    migrated = manage("migrate", apps=apps, folder=tmp_path).stderr
    assert migrated
    assert done.stderr.startswith(migrated)


@pytest.mark.parametrize(
    ("variables", "what", "needs"),
    [
        ({"SHOP_MODE": "shadow"}, "The mode 'shadow' of a task", "shadow"),
        ({"SHOP_SINK": "1"}, "OUTBOX['SINK']", "pipeline"),
    ],
    ids=["mode", "sink"],
)
def test_check_names_the_line_for_a_setting(
    variables: dict[str, str], what: str, needs: str, tmp_path: Path
) -> None:
    done = manage("check", apps="core events", folder=tmp_path, **variables)
    assert done.returncode == 1
    assert f"(outbox.E049) {what} needs outbox_app.{needs}, which" in done.stderr
    assert f'HINT: Add "outbox_app.{needs}" to INSTALLED_APPS' in done.stderr


def test_a_call_in_shadow_mode_names_the_line(tmp_path: Path) -> None:
    call = (
        "from django.db import transaction; from tests.apps.shop.celery import shadowed\n"
        "    def call():\n        with transaction.atomic(): shadowed.delay()"
    )
    done = run("-c", CALL.format(call=call), apps="core", folder=tmp_path, SHOP_MODE="shadow")
    assert 'Add "outbox_app.shadow" to INSTALLED_APPS, and run' in done.stdout, done.stderr


def test_a_command_names_the_line_without_a_traceback(tmp_path: Path) -> None:
    assert manage("migrate", "-v0", apps="core events", folder=tmp_path).returncode == 0
    command = ("outbox_prune", "--archived", "/nowhere", "--older-than", "1")
    done = manage(*command, apps="core events", folder=tmp_path)
    assert done.returncode == 2
    assert done.stderr == (
        "CommandError: INSTALLED_APPS does not have outbox_app.pipeline. Add "
        '"outbox_app.pipeline" to INSTALLED_APPS, and run manage.py migrate.\n'
    )


def test_no_migration_deletes_the_models_of_an_app_that_is_off(tmp_path: Path) -> None:
    done = manage(
        *("makemigrations", "--dry-run", "--skip-checks"),
        apps="core entities prepared",
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "No changes detected" in done.stdout
