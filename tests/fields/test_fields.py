"""Keys that differ in case or in a trailing space are two on each database, by plain migrations."""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager

import pytest
from django.db import connections, models
from django.db.migrations import AlterField, CreateModel
from django.db.migrations.state import ProjectState
from django.db.migrations.writer import MigrationWriter
from django.test.utils import isolate_apps

from outbox_app.fields import CharField, TextField, exact_collation
from tests import forking
from tests.servers.mysql import MARIADB

pytestmark = pytest.mark.django_db(transaction=True)
#: Keys that MySQL's and MariaDB's default collations call equal.
KEYS = ["casey", "Casey", "cäsey", "casey "]
MODELS = """
from outbox_app.entities import Entity, EntityVersion, command
from outbox_app.events.models import EventLog
class Bill(EventLog): pass
class PurseVersion(EntityVersion): pass
class Purse(Entity):
    versions = PurseVersion
    @command(creates=True)
    def open(self, owner): self.state = {"owner": owner}
"""
SETTINGS = """
from tests.settings import *
INSTALLED_APPS = ["outbox_app", "outbox_app.events", "outbox_app.entities", "bank"]
DATABASES = {{"default": {database}}}
OUTBOX, ROOT_URLCONF, MIDDLEWARE = {{}}, "", []
SILENCED_SYSTEM_CHECKS = ["outbox.W001"]
"""
CHECKED = ("-m", "django", "makemigrations", "--check", "--dry-run")
USED = """
import django
django.setup()
from django.db import transaction
from bank.models import Bill, Purse
from outbox_app.events import publish
from outbox_app.models import DeadJob
for key in {keys}:
    Purse.execute(key, "open", {{"owner": key}}, command_id="open")
    with transaction.atomic():
        publish(key, "made", log=Bill)
    assert Purse.objects.get(pk=key).state == {{"owner": key}}
    assert Bill.objects.get(stream=key).version == 1
DeadJob.objects.create(shard=1, task="t", task_id="1", body=b"", envelope="", staged_id=1,
                       error="E", reason="\\N{{PARTY POPPER}} was refused")
print(DeadJob.objects.get().reason == "\\N{{PARTY POPPER}} was refused")
"""


@pytest.fixture
def tables(alias):
    """``Owner``, with keys and a text that are exact, and ``Pet`` with a foreign key to it."""
    with isolate_apps("tests"):

        class Owner(models.Model):
            name = CharField(max_length=40, primary_key=True)
            mail = CharField(max_length=40, unique=True, null=True)
            note = TextField(default="")

            class Meta:
                app_label = "tests"

            def __str__(self):
                return self.name

        class Pet(models.Model):
            owner = models.ForeignKey(Owner, models.CASCADE)

            class Meta:
                app_label = "tests"

            def __str__(self):
                return str(self.pk)

        with connections[alias].schema_editor() as editor:
            editor.create_model(Owner)
            editor.create_model(Pet)
        yield Owner, Pet
        with connections[alias].schema_editor() as editor:
            editor.delete_model(Pet)
            editor.delete_model(Owner)


def test_only_equal_keys_are_equal(alias, tables):
    Owner, Pet = tables
    for key in KEYS:
        Owner.objects.using(alias).create(name=key, mail=key, note=key)
        Pet.objects.using(alias).create(owner_id=key)
    for key in KEYS:
        assert Owner.objects.using(alias).get(name=key).mail == key
        assert Owner.objects.using(alias).get(note=key).name == key
        assert Pet.objects.using(alias).filter(owner=key).count() == 1
        assert Pet.objects.using(alias).get(owner__mail=key).owner_id == key


def test_a_collation_of_ones_own_stays(alias):
    field = CharField(max_length=9, db_collation="C")
    assert field.db_parameters(connections[alias])["collation"] == "C"
    collation = TextField().db_parameters(connections[alias])["collation"]
    assert collation == exact_collation(connections[alias])


def test_migrations_refer_to_the_fields_by_a_path_that_stays():
    field = CharField(max_length=9, null=True)
    assert MigrationWriter.serialize(field) == (
        "outbox_app.fields.CharField(max_length=9, null=True)",
        {"import outbox_app.fields"},
    )
    assert TextField().deconstruct()[1] == "outbox_app.fields.TextField"


def test_a_migration_makes_a_plain_field_exact(alias):
    """The foreign key follows. PostgreSQL needs no statement."""
    connection, before = connections[alias], ProjectState()
    plain = models.CharField(max_length=9, primary_key=True)
    key = models.ForeignKey("tests.Owner", models.CASCADE)
    make = [CreateModel("Owner", [("name", plain)]), CreateModel("Pet", [("owner", key)])]
    alter = AlterField("Owner", "name", CharField(max_length=9, primary_key=True))
    for each in make:
        after = before.clone()
        each.state_forwards("tests", after)
        with connection.schema_editor() as editor:
            each.database_forwards("tests", editor, before, after)
        before = after
    owner, pet = (before.apps.get_model("tests", name) for name in ("Owner", "Pet"))
    try:
        owner.objects.using(alias).create(name="casey")
        pet.objects.using(alias).create(owner_id="casey")
        after = before.clone()
        alter.state_forwards("tests", after)
        with connection.schema_editor(collect_sql=connection.vendor == "postgresql") as editor:
            alter.database_forwards("tests", editor, before, after)
        assert not (connection.vendor == "postgresql" and editor.collected_sql)
        owner.objects.using(alias).create(name="Casey")
        pet.objects.using(alias).create(owner_id="Casey")
        assert pet.objects.using(alias).get(owner__name="casey").owner_id == "casey"
    finally:
        with connection.schema_editor() as editor:
            editor.delete_model(pet)
            editor.delete_model(owner)


@contextmanager
def database(name, charset):
    with connections[MARIADB].cursor() as cursor:
        cursor.execute(f"CREATE DATABASE {name} CHARACTER SET {charset}")
        try:
            yield
        finally:
            cursor.execute(f"DROP DATABASE {name}")


def project(folder, database):
    """Make a project. Returns ``run(*arguments)``: the output of Python in it."""
    (folder / "bank" / "migrations").mkdir(parents=True)
    for file in ("bank/__init__.py", "bank/migrations/__init__.py"):
        (folder / file).touch()
    (folder / "bank/models.py").write_text(MODELS)
    (folder / "bank_settings.py").write_text(SETTINGS.format(database=database))

    def run(*arguments, fails=False):
        done = forking.run(
            [sys.executable, *arguments],
            cwd=forking.ROOT,
            env={
                **os.environ,
                "DJANGO_SETTINGS_MODULE": "bank_settings",
                "PYTHONPATH": f"{folder}{os.pathsep}{forking.ROOT}",
            },
            capture_output=True,
            text=True,
        )
        assert bool(done.returncode) == fails, done.stdout + done.stderr
        return done.stdout + done.stderr

    return run


@pytest.mark.parametrize("new_database", ["default", "postgres", "mariadb"], indirect=True)
def test_a_project_needs_no_line_by_hand(new_database, tmp_path):
    """Its migrations and the package's are complete, before and after they are applied."""
    sqlite = {**connections.settings["default"], "NAME": str(tmp_path / "bank.sqlite3")}
    python = project(tmp_path, new_database or sqlite)
    assert "Create model Purse" in python(*CHECKED, fails=True)
    python("-m", "django", "makemigrations", "bank")
    for command in ("migrate", "check --database default"):
        assert python(*CHECKED) == "No changes detected\n"
        python("-m", "django", *command.split())
    assert python("-c", USED.format(keys=KEYS)) == "True\n"


class TestProject:
    """A project with a log and an entity type of its own, and none of its migrations edited."""

    @pytest.fixture(params=["utf8mb4", "latin1"])
    def python(self, request, tmp_path):
        """``python(*arguments)``: its output, in the project with a database of its own."""
        name = f"test_outbox_fields_{request.param}_{os.getpid()}"
        with database(name, request.param):
            yield project(tmp_path, f'{{**DATABASES["{MARIADB}"], "NAME": "{name}"}}')

    @pytest.fixture
    def manage(self, python):
        return lambda *arguments, **options: python("-m", "django", *arguments, **options)

    @pytest.mark.parametrize("alias", ["mariadb"], indirect=True)
    def test_plain_migrations(self, alias, python, manage):
        manage("makemigrations", "bank")
        manage("migrate")
        assert "no issues" in manage("check", "--database", "default")
        assert python("-c", USED.format(keys=KEYS)) == "True\n"

    @pytest.mark.parametrize("alias", ["mariadb"], indirect=True)
    def test_tables_with_plain_columns_are_converted(self, alias, python, manage, tmp_path):
        """The next migration converts them, and no check stops it."""
        manage("makemigrations", "bank")
        [first] = (tmp_path / "bank/migrations").glob("0001*.py")
        first.write_text(first.read_text().replace("outbox_app.fields.Char", "models.Char"))
        manage("migrate")
        found = manage("check", "--database", "default", fails=True)
        assert "outbox.E009" in found
        assert "Run manage.py makemigrations, and migrate --database default" in found
        manage("makemigrations", "bank")
        assert "outbox.W048" in manage("check", "--database", "default")
        assert "outbox.W048" in manage("migrate")
        assert "no issues" in manage("check", "--database", "default")
        assert python("-c", USED.format(keys=KEYS)) == "True\n"
