"""A release's schema with rows in it migrates, and the release before goes on beside the new one.

``BEFORE`` is the last migration of the release before; a release moves it. Its models, as the
migrations know them, are the older code: they insert, read and delete beside the new schema.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from django.db import models
from django.db.migrations.loader import MigrationLoader

ROOT = Path(__file__).parents[2]
BEFORE = "0012_commands_of_peers"
UPGRADE = """
import sys, uuid

import django
from django.conf import settings

settings.configure(
    SECRET_KEY="x", USE_TZ=True,
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    INSTALLED_APPS=["django.contrib.auth", "django.contrib.contenttypes", "outbox_app"],
)
django.setup()

from django.core.management import call_command
from django.db import connection, models
from django.db.migrations.executor import MigrationExecutor
from django.utils import timezone

SAMPLES = {
    models.UUIDField: lambda: uuid.uuid4(), models.DateTimeField: timezone.now,
    models.JSONField: dict, models.BinaryField: lambda: b"x", models.BooleanField: lambda: False,
    models.CharField: lambda: "x", models.TextField: lambda: "x", models.FloatField: lambda: 1.0,
}
count = 0

def sample(field):
    global count
    count += 1
    for kind, make in SAMPLES.items():
        if isinstance(field, kind):
            given = make()
            return f"{given}{count}" if given == "x" and field.max_length != 1 else given
    return count % 32000

def insert(model):
    given = {
        field.name: sample(field) for field in model._meta.concrete_fields
        if not field.has_default() and not field.null
        and field.db_default is models.NOT_PROVIDED
        and not isinstance(field, models.AutoField)
    }
    return model._default_manager.create(**given)

call_command("migrate", "outbox_app", sys.argv[1], verbosity=0)
call_command("migrate", "auth", verbosity=0)
state = MigrationExecutor(connection).loader.project_state([("outbox_app", sys.argv[1])])
older = [each for each in state.apps.get_app_config("outbox_app").get_models()
         if each._meta.managed and not each._meta.proxy]
rows = {model: insert(model).pk for model in older}
call_command("migrate", verbosity=0)
for model, pk in rows.items():
    assert model._default_manager.filter(pk=pk).exists(), model
    row = insert(model)  # the older code beside the new schema
    assert model._default_manager.get(pk=row.pk)
    row.delete()
print(len(rows), "tables")
"""


def test_rows_stay_and_older_code_goes_on() -> None:
    done = subprocess.run(
        [sys.executable, "-c", UPGRADE, BEFORE], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.split()[0]) >= 12


def test_new_columns_take_rows_of_older_code() -> None:
    """Also where a database is stricter than SQLite: each has a default there, or is null."""
    loader = MigrationLoader(None)
    old = loader.project_state([("outbox_app", BEFORE)]).apps.get_app_config("outbox_app")
    new = loader.project_state().apps.get_app_config("outbox_app")
    for before in old.get_models():
        after = new.get_model(before.__name__)
        assert after._meta.db_table == before._meta.db_table
        kept = {field.column for field in before._meta.concrete_fields}
        columns = {field.column: field for field in after._meta.concrete_fields}
        assert kept <= set(columns), "a column is gone that older code reads"
        for name in set(columns) - kept:
            field = columns[name]
            assert field.null or field.db_default is not models.NOT_PROVIDED, (after, name)
