"""Executors have no Django, and most projects no Spark and no peers: each works without them."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

WITHOUT_DJANGO = """
import importlib, pkgutil, sys
import outbox_app.events.log.scans, outbox_app.events.log.windows
import outbox_app.pipeline, pyspark_outbox
count = 0
for package in (outbox_app.pipeline, outbox_app.events.log.scans, outbox_app.events.log.windows):
    for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if info.name.split(".")[2] in ("apps", "doors", "driver", "management"):
            continue
        importlib.import_module(info.name)
        assert "django" not in sys.modules, info.name
        count += 1
print(count)
"""

WITHOUT_SPARK = """
import importlib, pkgutil, sys

BLOCKED = "pyspark", "py4j", "pyarrow", "adbc_driver_postgresql"
BLOCKED += "cryptography", "http_message_signatures", "tooz"  # the extras door and coordination

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
import django
from django.core.management import CommandError, call_command
django.setup()
import outbox_app
count = 0
for info in pkgutil.iter_modules(outbox_app.__path__, "outbox_app."):
    if info.name not in ("outbox_app.pipeline", "outbox_app.pytest_plugin"):
        importlib.import_module(info.name)
        count += 1
WITHOUT = "jobs", "process", "monitoring", "events", "sharding", "shadow", "ids"
NEED_EXTRAS = "door.plain", "door.signing", "prepared.remote", "fleet.registries.tooz"
WITHOUT += "entities", "prepared", "fleet", "door"
for package in ("admin", "checks", "management.commands", *WITHOUT):
    package = importlib.import_module(f"outbox_app.{package}")
    for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        if info.name.removeprefix("outbox_app.") not in NEED_EXTRAS:
            importlib.import_module(info.name)
            count += 1
call_command("check")
try:
    call_command("outbox_pipeline", "archive", "--to", "nowhere")
except CommandError as error:
    print(count, error.returncode, error)
"""


def python(code: str, **environment: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environment},
        check=False,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_executors_import_no_django() -> None:
    assert int(python(WITHOUT_DJANGO)) > 20


def test_everything_else_works_without_spark_and_other_extras() -> None:
    told = python(WITHOUT_SPARK, DJANGO_SETTINGS_MODULE="tests.settings")
    count, code, message = told.strip().rpartition("\n")[2].split(" ", 2)
    assert int(count) > 60
    assert int(code) == 2
    assert "pyspark cannot be imported: pip install 'outbox-app[spark]'" in message
    assert not (ROOT / "nowhere").exists()
