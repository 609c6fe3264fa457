"""The migration from drainers to processes keeps rows and permissions, forwards and backwards."""

import os
import sys
from pathlib import Path

import pytest

from tests import forking

ROOT = Path(__file__).parents[2]
SETTINGS = """
from tests.settings import *
INSTALLED_APPS = [{apps} "outbox_app"]
DATABASES = {{"default": DATABASES["default"]}}
ROOT_URLCONF = ""
SILENCED_SYSTEM_CHECKS = ["fields", "outbox.W001", "outbox.E023"]
"""
AUTH = '"django.contrib.contenttypes", "django.contrib.auth",'
#: Names of the permissions that a group has, and what the one process has done.
SHOWN = """
import django
django.setup()
from django.contrib.auth.models import Permission
from django.db import connection
with connection.cursor() as cursor:
    cursor.execute("SELECT {column} FROM {table}")
    print(cursor.fetchall()[0][0])
print(sorted(Permission.objects.filter(group__name="g").values_list("codename", "name")))
"""
GRANTED = """
import django
django.setup()
from django.contrib.auth.models import Group, Permission
from django.db import connection
names = ("view_drainer", "view_query_drainer", "view_lease")
Group.objects.create(name="g").permissions.set(Permission.objects.filter(codename__in=names))
with connection.cursor() as cursor:
    cursor.execute(
        "INSERT INTO outbox_drainer (id, resource, host, pid, lease_seconds, published, expired, "
        "dead, trouble) VALUES ('01', 'jobs', 'web', 7, 10, 4711, 0, 0, '')"
    )
"""
OLD = [
    ("view_drainer", "Can view drainer"),
    ("view_lease", "Can view lease"),
    ("view_query_drainer", "Can see the queries of sessions that block work"),
]
NEW = [
    ("view_lease", "Can view lease"),
    ("view_process", "Can view process"),
    ("view_query_process", "Can see the queries of sessions that block work"),
]


@pytest.fixture
def python(tmp_path):
    """``python(*arguments, apps=AUTH)``: Python's output, in a project with its own database."""

    def run(*arguments, apps=AUTH):
        (tmp_path / "old.py").write_text(SETTINGS.format(apps=apps))
        done = forking.run(
            [sys.executable, *arguments],
            cwd=ROOT,
            env={
                **os.environ,
                "DJANGO_SETTINGS_MODULE": "old",
                "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
                "SQLITE_FILE": str(tmp_path / "old.sqlite3"),
            },
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    return run


def migrate(python, *target, **options):
    python("-m", "django", "migrate", "--skip-checks", *target, **options)


def test_rows_and_permissions_stay(python):
    migrate(python, "outbox_app", "0005")
    migrate(python, "auth")
    python("-c", GRANTED)
    migrate(python)
    shown = python("-c", SHOWN.format(column="done", table="outbox_process"))
    assert shown == ["4711", str(NEW)]

    migrate(python, "outbox_app", "0005")
    shown = python("-c", SHOWN.format(column="published", table="outbox_drainer"))
    assert shown == ["4711", str(OLD)]


def test_an_older_schema_is_checked(python):
    """``migrate`` checks before it adds columns."""
    migrate(python, "outbox_app", "0003")
    python("-m", "django", "migrate")


def test_a_project_without_users(python):
    migrate(python, "outbox_app", "0005", apps="")
    migrate(python, apps="")
    migrate(python, "outbox_app", "0005", apps="")
