"""The previous release's schema with rows migrates, and its code runs beside the new release.

``BEFORE`` is the last migration of the previous release, and ``RELEASE`` its commit; each release
moves both. Its models, from the migrations, insert, read and delete on the new schema. Its drainer,
from the history of the checkout, runs beside ours on both schemas.
"""

from __future__ import annotations

import base64
import io
import json
import os
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import django
import pytest
import redis
from django.db import models
from django.db.migrations.loader import MigrationLoader

from tests import forking
from tests.patience import eventually, patience
from tests.servers import processes

ROOT = Path(__file__).parents[2]
BEFORE = "0012_commands_of_peers"
RELEASE = "93a1f34"
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


SQLITE = {
    "ENGINE": "django.db.backends.sqlite3",
    "OPTIONS": {
        "timeout": 60,
        "transaction_mode": "IMMEDIATE",
        "init_command": "PRAGMA journal_mode = WAL",
    },
}
SETTINGS = """
SECRET_KEY = "x"
USE_TZ = True
INSTALLED_APPS = ["django.contrib.auth", "django.contrib.contenttypes", "outbox_app", "shop"]
DATABASES = {{"default": {database!r}}}
OUTBOX = {{"LEASE_SECONDS": 15, "PUBLISH_TIMEOUT": 10}}
"""
TASKS = """
from outbox_app.celery import OutboxCelery

app = OutboxCelery("shop", broker={broker!r})


@app.task
def send(number): ...
"""
STAGE = """
import outbox_app, sys
from django.db import transaction
from shop.tasks import send

assert outbox_app.__file__.startswith({package!r}), outbox_app.__file__
with transaction.atomic():
    for number in range({first}, {first} + {jobs}):
        send.delay(number)
"""
OWNERS = """
from outbox_app.models import Lease

print(Lease.objects.filter(owner__isnull=False).values("owner").distinct().count())
"""
INCIDENTS = """
from outbox_app.models import Incident

print(Incident.objects.count())
"""
JOBS = 60


class Code:
    """The package of one release, in processes of a project that uses it."""

    def __init__(self, package: Path, project: Path) -> None:
        self.package, self.project = package, project
        self.environment = {
            **os.environ,
            "PYTHONPATH": str(package),
            "DJANGO_SETTINGS_MODULE": "shop.settings",
        }

    def run(self, *arguments: str) -> str:
        done = forking.run(
            [sys.executable, "-m", "django", *arguments],
            cwd=self.project,
            env=self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return str(done.stdout)

    def stage(self, first: int) -> None:
        self.run("shell", "-c", STAGE.format(package=str(self.package), first=first, jobs=JOBS))

    def ask(self, question: str) -> int:
        return int(self.run("shell", "-v", "0", "-c", question))

    @contextmanager
    def draining(self) -> Iterator[Path]:
        """Run a drainer; leave its log."""
        log = self.project / f"{self.package.name}.log"
        with log.open("w") as output:
            drainer = forking.Popen(
                [sys.executable, "-m", "django", "drain_outbox"],
                cwd=self.project,
                env=self.environment,
                stdout=output,
                stderr=output,
            )
        processes.guard_process(drainer.pid)
        try:
            eventually(lambda: "Drainer started" in log.read_text(), "the drainer starts")
            yield log
            drainer.send_signal(signal.SIGTERM)
            assert drainer.wait(patience(60)) == 0, log.read_text()
        finally:
            drainer.kill()
            drainer.wait()
            processes.forget_process(drainer.pid)


@pytest.fixture(scope="module")
def released(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package of the previous release."""
    packed = subprocess.run(
        ["git", "archive", RELEASE, "outbox_app", "setup.cfg"], cwd=ROOT, capture_output=True
    )
    if packed.returncode:
        pytest.skip(f"the checkout has no history: {packed.stderr.decode()}")
    folder = tmp_path_factory.mktemp("released")
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    version = "{}.{}".format(*django.VERSION)
    if f"Framework :: Django :: {version}\n" not in (folder / "setup.cfg").read_text():
        pytest.skip(f"the release before does not support Django {version}")
    return folder


@pytest.fixture
def releases(
    tmp_path: Path, released: Path, new_database: dict[str, Any], redis_url: str
) -> tuple[Code, Code]:
    """The older and the newer code of one project."""
    database = new_database or {**SQLITE, "NAME": str(tmp_path / "db.sqlite3")}
    shop = tmp_path / "shop"
    shop.mkdir()
    (shop / "__init__.py").write_text("from .tasks import app\n")
    (shop / "settings.py").write_text(SETTINGS.format(database=database))
    (shop / "tasks.py").write_text(TASKS.format(broker=redis_url))
    return Code(released, tmp_path), Code(ROOT, tmp_path)


def sent(broker: redis.Redis) -> list[int]:
    messages = [json.loads(each)["body"] for each in broker.lrange("celery", 0, -1)]
    return [json.loads(base64.b64decode(each))[0][0] for each in messages]


@pytest.mark.slow
@pytest.mark.parametrize("schema", ["new", "old"])
@pytest.mark.parametrize("new_database", ["default", "postgres", "mariadb"], indirect=True)
def test_drainers_of_both_releases_share_the_work(
    releases: tuple[Code, Code], schema: str, redis_url: str
) -> None:
    """Each of their jobs leaves, whichever schema is there, and neither drainer fails.

    Once, but for what an incident explains: a lease may run out on a busy machine.
    """
    older, newer = releases
    older.run("migrate", "--verbosity", "0")
    older.stage(0)
    with redis.Redis.from_url(redis_url) as broker:
        with older.draining() as one:
            eventually(lambda: broker.llen("celery") == JOBS, "the older drainer works")
            if schema == "new":
                newer.run("migrate", "--verbosity", "0")
            with newer.draining() as other:
                eventually(lambda: older.ask(OWNERS) == 2, "they share the shards")
                newer.stage(JOBS)
                older.stage(2 * JOBS)
                eventually(lambda: {*sent(broker)} == {*range(3 * JOBS)}, "all jobs have left")
        assert len(sent(broker)) == 3 * JOBS or older.ask(INCIDENTS)
    for log in (one, other):
        assert "ERROR" not in log.read_text(), log.read_text()
