"""A data migration that stages before the outbox's tables exist: the error names the dependency."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from django.contrib.auth.models import Group
from django.core.management import call_command
from django.db import connections, transaction

from outbox_app.database import transactions
from outbox_app.events import publish
from outbox_app.events.models import Event
from outbox_app.exceptions import NotMigrated
from outbox_app.models import StagedJob
from tests import forking

ROOT = Path(__file__).resolve().parents[3]
MIGRATION = """
from django.db import migrations

def forwards(apps, schema_editor):
    from outbox_app.celery import OutboxCelery
    OutboxCelery("early", broker="memory://", set_as_current=False).send_task("elsewhere")

class Migration(migrations.Migration):
    dependencies = {dependencies}
    operations = [migrations.RunPython(forwards)]
"""


@pytest.fixture
def migrating(alias):
    """``migrate`` is running on the alias."""
    transactions._begin(using=alias)
    yield
    transactions._end(using=alias)


@pytest.mark.django_db(transaction=True)
def test_without_the_tables_it_is_refused_before_any_sql(
    alias, add, migrating, monkeypatch, staged
):
    with transaction.atomic(using=alias):
        Group.objects.using(alias).create(name="before")
        with monkeypatch.context() as patched:
            patched.setattr(StagedJob._meta, "db_table", "outbox_not_yet")
            patched.setattr(Event._meta, "db_table", "outbox_not_yet")
            with pytest.raises(NotMigrated, match=r'\[\("outbox_app", "0001_initial"\)\]'):
                add.delay(1, 1)
            with pytest.raises(NotMigrated, match=r'\[\("outbox_events", "0001_initial"\)\]'):
                publish("order-1", "order.placed", using=alias)
        add.delay(2, 2)

    assert staged() == [[2, 2]]
    assert Group.objects.using(alias).exists(), "the transaction stays usable"


@pytest.mark.django_db(transaction=True)
def test_no_query_is_spent_where_nothing_migrates(alias, add, django_assert_num_queries):
    call_command("migrate", "outbox_app", database=alias, verbosity=0)  # begins, and ends
    one_query = django_assert_num_queries(1, connection=connections[alias])
    with transaction.atomic(using=alias), one_query:
        add.delay(1, 1)


@pytest.mark.parametrize(("dependencies", "code"), [([], 1), ([("outbox_app", "0001_initial")], 0)])
def test_a_new_installation(tmp_path, dependencies, code):
    migrations = tmp_path / "early" / "migrations"
    migrations.mkdir(parents=True)
    for package in (migrations.parent, migrations):
        (package / "__init__.py").touch()
    (migrations / "0001_calls.py").write_text(MIGRATION.format(dependencies=dependencies))
    (tmp_path / "new.py").write_text(
        "from tests.settings import *\n"
        "INSTALLED_APPS = ['early', 'outbox_app']\n"
        "DATABASES = {'default': DATABASES['default']}\n"
        "SILENCED_SYSTEM_CHECKS = ['fields', 'outbox.W001', 'outbox.E023']\n"
    )
    done = forking.run(
        [sys.executable, "-m", "django", "migrate", "--skip-checks"],
        cwd=ROOT,
        env={
            **os.environ,
            "DJANGO_SETTINGS_MODULE": "new",
            "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
            "SQLITE_FILE": str(tmp_path / "new.sqlite3"),
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == code, done.stderr
    if code:
        assert 'dependencies = [("outbox_app", "0001_initial")]' in done.stderr
