"""An alias on which the routers allow the tables of jobs alone, in a project with all apps."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.apps.processes import manage

pytestmark = pytest.mark.system

APPS = "core events entities prepared door fleet ids django_tasks shadow pipeline"
STAGE = """
from django.db import transaction
from outbox_app import cancel
from outbox_app.jobs import requeue_dead
from outbox_app.models import DeadJob, StagedJob
from tests.apps.shop.celery import note

with transaction.atomic(using="jobs"):
    first, second = (note.apply_async((text,), using="jobs") for text in "ab")
assert cancel(first.id, using="jobs")
job = StagedJob.objects.using("jobs").get()
job.as_dead(error="E", reason="why").save(using="jobs")
StagedJob.objects.using("jobs").all().delete()
requeue_dead(DeadJob.objects.using("jobs"), by="ann", reason="why")
print(StagedJob.objects.using("jobs").count(), "job")
"""
#: Lists of jobs offer the alias; those of other apps do not, and so find their tables.
PAGES = """
from django.contrib import admin
from django.contrib.auth.models import User
from django.test import Client
from django.urls import reverse

client, found = Client(), set()
client.force_login(User.objects.create_superuser("ann"))
for model in admin.site._registry:
    if model.__module__.startswith("outbox_app."):
        name = f"admin:{model._meta.app_label}_{model._meta.model_name}_changelist"
        answer = client.get(reverse(name) + "?outbox=jobs")
        found.add(answer.status_code)
print(found)
"""


def test_jobs_work_where_no_other_app_has_tables(tmp_path: Path) -> None:
    def run(*arguments: str) -> str:
        done = manage(*arguments, apps=APPS, folder=tmp_path, SHOP_JOBS_ELSEWHERE="1")
        assert done.returncode == 0, done.stdout + done.stderr
        return str(done.stdout)

    run("migrate", "--verbosity", "0", "--skip-checks")
    run("migrate", "--database", "jobs", "--verbosity", "0", "--skip-checks")
    assert run("shell", "-v", "0", "-c", STAGE).strip().endswith("1 job")
    assert "Unavailable" not in run("drain_outbox", "--once", "--database", "jobs")
    assert run("shell", "-v", "0", "-c", PAGES).strip().endswith("{200}")
    done = manage(
        *("outbox_status", "--json", "--database", "jobs"),
        apps=APPS, folder=tmp_path, SHOP_JOBS_ELSEWHERE="1",
    )  # fmt: skip
    facts = json.loads(done.stdout)
    assert facts["backlog"]["jobs"] == 0, done.stderr
    assert "subscriptions" not in facts
    run("run_outbox", "--once", "--database", "jobs")
