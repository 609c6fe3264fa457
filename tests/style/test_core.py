"""Django and Celery are enough: a project without extras imports no package of an extra."""

from __future__ import annotations

import configparser
import re
import subprocess
import sys
from importlib.metadata import packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[2]
#: What a project loads: apps, admin, checks, each command, addresses, the tables.
PROJECT = """
import sys
from importlib.abc import MetaPathFinder

class Absent(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in sys.argv[1:]:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())

import django
from django.conf import settings

settings.configure(
    SECRET_KEY="x", ROOT_URLCONF="urls", STATIC_URL="static/",
    DATABASES={"default": {"ENGINE": "django.db.backends.sqlite3", "NAME": ":memory:"}},
    INSTALLED_APPS=[f"django.contrib.{name}" for name in
                    ("admin", "auth", "contenttypes", "messages", "sessions")] + ["outbox_app"]
                   + [f"outbox_app.{name}" for name in
                      ("events", "entities", "prepared", "door", "fleet", "ids", "django_tasks",
                       "shadow", "pipeline")],
    MIDDLEWARE=[], TEMPLATES=[{"BACKEND": "django.template.backends.django.DjangoTemplates"}],
)
django.setup()

import types
from django.contrib import admin
from django.core.management import call_command, get_commands, load_command_class
from django.urls import include, path, reverse

urls = types.ModuleType("urls")
urls.urlpatterns = [path("admin/", admin.site.urls), path("outbox/", include("outbox_app.urls"))]
sys.modules["urls"] = urls
names = {name: app for name, app in get_commands().items() if app.startswith("outbox_app")}
for name, app in names.items():
    load_command_class(app, name)
call_command("migrate", verbosity=0)
call_command("drain_outbox", "--once", skip_checks=True)
assert reverse("admin:outbox_app_overview")

import outbox_app.celery, outbox_app.entities, outbox_app.events, outbox_app.fleet
import outbox_app.ids, outbox_app.prepared, outbox_app.sharding
for room in (outbox_app, outbox_app.entities, outbox_app.events, outbox_app.fleet, outbox_app.ids,
             outbox_app.prepared, outbox_app.sharding):
    for name in room.__all__:
        getattr(room, name)
print(len(names), "commands")
"""


def modules_of_extras() -> set[str]:
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    lines = "\n".join(config["options.extras_require"].values())
    wanted = {name.lower().replace("_", "-") for name in re.findall(r"^[\w.-]+", lines, re.M)}
    wanted -= {"outbox-app", "celery"}
    return {
        module
        for module, names in packages_distributions().items()
        if wanted & {name.lower().replace("_", "-") for name in names}
    }


def test_a_project_without_extras_loads_all_of_it() -> None:
    absent = modules_of_extras() | {"redis"}
    assert {"cryptography", "http_message_signatures", "psycopg", "MySQLdb", "pyspark"} <= absent
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROJECT, *sorted(absent)],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"(.*\n)*\d\d commands\n", done.stdout)
