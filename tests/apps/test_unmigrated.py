"""An app was added to INSTALLED_APPS, and its tables are not there yet: jobs are not hidden."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.apps.processes import manage

pytestmark = pytest.mark.system

APPS = "core events entities prepared door fleet ids django_tasks shadow pipeline"
PAGES = """
from django.contrib.auth.models import User
from django.test import Client

client = Client()
client.force_login(User.objects.create_superuser("ann"))
page = client.get("/admin/outbox_app/overview/")
assert page.status_code == 200, page
assert "installed apps have no tables yet" in page.content.decode()
for path in ("/outbox/health/", "/outbox/metrics/"):
    print(path, client.get(path).status_code)
"""


def test_the_status_of_jobs_is_shown(tmp_path: Path) -> None:
    def run(*arguments: str, apps: str = APPS) -> Any:
        return manage(*arguments, apps=apps, folder=tmp_path, SHOP_SERVICE="shop")

    assert run("migrate", "--verbosity", "0", apps="core").returncode == 0
    done = run("outbox_status", "--json")
    assert "backlog" in json.loads(done.stdout), done.stderr
    text = run("outbox_status").stdout
    assert "installed apps have no tables yet" in text
    assert "manage.py migrate outbox_events --database default" in text
    done = run("shell", "-v", "0", "-c", PAGES)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "/outbox/metrics/ 200" in done.stdout
    assert run("drain_outbox", "--once").returncode == 0
    for command in (["outbox_subscriptions", "list"], ["run_prepared", "--once"]):
        done = run(*command)
        assert done.returncode == 2, done.stdout + done.stderr
        assert "Run: manage.py migrate outbox_" in done.stdout + done.stderr
