"""``manage.py check --deploy --database ALIAS`` over a whole project, good and bad."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import pytest
import redis
from django.db import connections
from django.test.utils import CaptureQueriesContext

from outbox_app.events.checks import check_log_tables
from tests import forking
from tests.faults.test_pgbouncer import pooler
from tests.faults.tools import on

__all__ = ["pooler"]

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = """\
import json, os
from outbox_app.celery import OutboxCelery
from tests.settings import *
from tests.tasks import add

app = OutboxCelery("preflight", broker=os.environ["BROKER"])
app.conf.update(json.loads(os.environ["CONF"]))
app.conf.imports = ["tests.mixin.tasks"]
app.task(name="add", shared=False)(add)
SILENCED_SYSTEM_CHECKS = json.loads(os.environ["SILENCED"])
DATABASES[os.environ["OUTBOX_ALIAS"]].update(json.loads(os.environ["KEPT"]))
if os.environ["OUTBOX_ALIAS"] != "default":
    DATABASE_ROUTERS = ["preflight.Router"]


class Router:
    def db_for_write(self, model, **hints):
        return os.environ["OUTBOX_ALIAS"]
"""
GOOD = {
    "task_acks_late": True,
    "task_default_queue_type": "quorum",
    "broker_transport_options": {"socket_timeout": 30, "read_timeout": 30, "write_timeout": 30},
}
ID = re.compile(r"\((outbox\.[EW]\d{3})\)")


class Outcome:
    """What a run of the command printed, and its exit code."""

    def __init__(self, code: int, said: str) -> None:
        self.code = code
        self.said = said
        self.ids = sorted(ID.findall(said))


@pytest.fixture
def check(tmp_path, environment):
    """``check(alias, *options, broker=…, conf=…, …)``: run the command in a separate project."""
    (tmp_path / "preflight.py").write_text(SETTINGS)

    def check(alias, *options, broker, conf=GOOD, kept=None, silenced=(), **variables):
        done = forking.run(
            [sys.executable, "-m", "django", "check", "--tag", "outbox", *options],
            cwd=ROOT,
            env={
                **environment(alias),
                "DJANGO_SETTINGS_MODULE": "preflight",
                "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}",
                "BROKER": broker,
                "CONF": json.dumps({"task_default_queue": f"preflight-{uuid4().hex}", **conf}),
                "KEPT": json.dumps(kept or {}),
                "SILENCED": json.dumps(list(silenced)),
                **variables,
            },
            capture_output=True,
            text=True,
        )
        return Outcome(done.returncode, done.stdout + done.stderr)

    return check


@pytest.fixture
def server(private_redis):
    """A client of the private server. The server's settings are restored after the test."""
    with redis.Redis.from_url(private_redis.url) as client:
        yield client
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("appendonly", "yes")


FULL = ("--deploy", "--database")


def test_a_good_configuration_is_not_spoken_of(alias, request, check):
    """Each database, and each broker: neither is asked about the other."""
    if alias == "postgres":
        url = request.getfixturevalue("rabbitmq_url")
    else:
        url = request.getfixturevalue("private_redis").url
    outcome = check(alias, *FULL, alias, "--fail-level", "WARNING", broker=url)
    assert (outcome.code, outcome.said) == (
        0,
        "System check identified no issues (0 silenced).\n",
    )


@on("postgres")
def test_a_bad_one_is_told_by_each_id(alias, check, environment, pooler, private_redis, server):
    """Each with what to do; what only --deploy asks, and only --database, is asked by both."""
    server.config_set("maxmemory-policy", "allkeys-lru")
    server.config_set("appendonly", "no")
    direct = urlsplit(environment(alias)["POSTGRES_URL"])
    bad = {
        "broker": private_redis.url,
        "conf": {
            "task_time_limit": 7200,
            "task_acks_late": False,
            "task_annotations": {"add": {"acks_late": True}},
        },
        "kept": {"OPTIONS": {"options": "-c synchronous_commit=off"}},
        "OUTBOX_LEASE_SECONDS": "0",
        "POSTGRES_URL": direct._replace(netloc=f"{direct.username}@127.0.0.1:{pooler}").geturl(),
    }
    settings = ["outbox.E003", "outbox.E003"]
    deploy = ["outbox.W020", "outbox.W052"]
    servers = ["outbox.E030", "outbox.W018", "outbox.W022"]

    everything = check(alias, *FULL, alias, **bad)
    assert everything.ids == sorted([*settings, *deploy, *servers])
    assert everything.code == 1
    assert everything.said.count("HINT: ") == len(everything.ids)
    without_servers = check(alias, "--deploy", **bad)
    assert without_servers.ids == sorted([*settings, *deploy])
    assert check(alias, "--database", alias, **bad).ids == settings


@on("postgres")
def test_commits_that_wait_for_no_disk(alias, check, private_redis):
    outcome = check(
        alias, *FULL, alias, broker=private_redis.url, PGOPTIONS="-c synchronous_commit=off"
    )
    assert (outcome.code, outcome.ids) == (0, ["outbox.W023"])


@on("mariadb")
def test_a_server_that_is_not_strict(alias, check, private_redis):
    kept = {"OPTIONS": {"charset": "utf8mb4", "init_command": "SET sql_mode = ''"}}
    outcome = check(alias, "--database", alias, broker=private_redis.url, kept=kept)
    assert (outcome.code, outcome.ids) == (1, ["outbox.E025"])


@on("default")
def test_sqlite_as_django_makes_it(alias, check, private_redis):
    """The tests' file is in WAL; transactions that begin as readers are a matter of settings."""
    kept = {"OPTIONS": {}}
    outcome = check(alias, *FULL, alias, broker=private_redis.url, kept=kept)
    assert outcome.code == 1
    assert "outbox.E026" in outcome.ids
    at_a_desk = check(alias, "--database", alias, broker=private_redis.url, kept=kept)
    assert (at_a_desk.code, at_a_desk.ids) == (0, ["outbox.W025"])


@on("default")
def test_rabbitmq_as_celery_uses_it(alias, check, rabbitmq_url):
    """Celery's own defaults are no error: a pipeline that was green stays so."""
    outcome = check(alias, *FULL, alias, broker=rabbitmq_url, conf={})
    assert (outcome.code, outcome.ids) == (0, ["outbox.W052"])


@on("default")
def test_a_broker_that_is_away_is_no_error(alias, check):
    outcome = check(alias, *FULL, alias, broker="redis://127.0.0.1:1")
    assert (outcome.code, outcome.ids) == (0, ["outbox.W015"])
    assert "Traceback" not in outcome.said


@on("default")
def test_silenced(alias, check, private_redis, server):
    server.config_set("maxmemory-policy", "allkeys-lru")
    outcome = check(alias, *FULL, alias, broker=private_redis.url, silenced=["outbox.E030"])
    assert (outcome.code, outcome.ids) == (0, [])


@on("default")
def test_no_check_waits_for_a_writer(alias):
    """SQLite has one. Django finds out whether there is JSON in a transaction, which waits."""
    connection = connections[alias]
    vars(connection.features).pop("supports_json_field", None)
    with CaptureQueriesContext(connection) as asked:
        assert list(check_log_tables(databases=[alias])) == []
    assert {query["sql"].split()[0] for query in asked} == {"SELECT"}
