"""A broker error that waiting cannot cure is reported in one sentence: no traceback, no secret."""

from __future__ import annotations

import subprocess
import sys

import pytest
import redis

from outbox_app.models import StagedJob
from tests.faults.tools import ROOT, draining, eventually, on

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("quick"),
]


@pytest.fixture
def urls(redis_url, rabbitmq, private_redis):
    """The addresses of real servers, for the placeholders in the URLs below."""
    with redis.Redis.from_url(private_redis.url) as client:
        client.config_set("requirepass", "other")
    closed = private_redis.url.removeprefix("redis://")
    yield {
        "REDIS": redis_url[8:-2],
        "RABBIT": rabbitmq.url[:-2].rpartition("@")[2],
        "CLOSED": closed,
    }
    with redis.Redis.from_url(private_redis.url, password="other") as client:
        client.config_set("requirepass", "")


@on("default")
@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("nonsense://me:secret@h", "No such transport: nonsense. Let broker_url begin with"),
        ("mongodb://me:secret@h", "the library of its transport is missing, or cannot be imported"),
        ("redis://h:secret/0", "its broker_url cannot be read. Write it as"),
        ("redis://me:pass/secret@REDIS/0", "at redis://me:**@REDIS/0 cannot be used"),
        ("redis://:12/secret@REDIS/0", "not **@REDIS/0. Correct broker_url"),
        ("redis://REDIS/shop", "not shop. Correct broker_url or broker_transport_options."),
        ("redis://REDIS/999", "out of range. Correct the number of the database in broker_url."),
        ("redis://me:secret@REDIS/0", "Correct the user and the password in broker_url"),
        ("redis://:secret@CLOSED", "Correct the user and the password in broker_url"),
        ("redis://CLOSED", "Correct the user and the password in broker_url"),
        ("amqp://guest:secret@RABBIT//", "at amqp://guest:**@RABBIT// cannot be reached"),
        ("amqp://guest:guest@RABBIT/shop", "Correct the virtual host in broker_url, or create it"),
    ],
)
def test_is_reported_in_one_sentence(alias, url, sentence, urls, make_named_app, book, caplog):
    app, jobs = make_named_app("memory://"), book(alias)
    jobs.stage(app, 1)
    for name, place in urls.items():
        url, sentence = url.replace(name, place), sentence.replace(name, place)
    app.conf.broker_url = url
    with draining(alias) as drainer:
        eventually(lambda: drainer.trouble, "it notices")
        eventually(lambda: drainer._apps[app.main].backoff.failures > 2, "it tries again")
        assert sentence in drainer.trouble

    said = [record.message for record in caplog.records if record.message.startswith("Unavailable")]
    assert len(said) == 1
    assert "secret" not in caplog.text + drainer.trouble
    assert not any(record.exc_info and record.exc_info[0] for record in caplog.records)
    assert StagedJob.objects.using(alias).count() == 1
    app.conf.broker_url = "memory://"


def test_without_the_library(tmp_path):
    program = """
import logging, sys
sys.modules["redis"] = None
import django
django.setup()
from django.core.management import call_command
from outbox_app.celery import OutboxCelery
from outbox_app.jobs.drain.drain import Drain
app = OutboxCelery("shop", broker="redis://me:secret@h")
logging.basicConfig(stream=sys.stdout)
call_command("check", "--tag", "outbox")
Drain().open_brokers()
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        check=True,
        text=True,
        cwd=ROOT,
        env={
            "DJANGO_SETTINGS_MODULE": "tests.settings",
            "DATABASE_URL": f"sqlite:///{tmp_path}/db",
            "PYTHONPATH": str(ROOT),
        },
    )
    sentence = "at redis://me:**@h cannot be used: the library of its transport is missing"
    assert sentence in done.stderr  # of the check
    assert "outbox.W028" in done.stderr
    assert sentence in done.stdout
    assert "pip install 'celery[redis]'" in done.stdout
    assert "secret" not in done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
