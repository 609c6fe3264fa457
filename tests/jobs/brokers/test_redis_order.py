"""Redis is out of memory while consumers free some: jobs of one key still leave in order."""

from __future__ import annotations

import json
import threading
from base64 import b64decode
from contextlib import contextmanager
from urllib.parse import urlsplit

import pytest
import redis
from django.db import transaction

from outbox_app import stage_many
from outbox_app.models import DeadJob, StagedJob
from tests.faults.tools import draining, eventually, on

from .redis_proxy import RedisProxy

pytestmark = [
    pytest.mark.django_db(transaction=True),
    on("default"),
    pytest.mark.usefixtures("quick"),
]

KEYS, JOBS = 7, 1000


@pytest.fixture
def server(private_redis):
    with redis.Redis.from_url(private_redis.url) as client:
        client.flushall()
        yield client
        client.config_set("maxmemory", "0")


def stage(app, alias):
    """Stage numbered jobs of a few keys, one transaction a hundred."""
    note = app.tasks["note"]
    for start in range(0, JOBS, 100):
        with transaction.atomic(using=alias):
            for key in range(KEYS):
                numbers = range(start + key, start + 100, KEYS)
                stage_many(
                    (note.s(str(key), n).set(shadow="x" * 4000) for n in numbers),
                    using=alias,
                    ordering_key=str(key),
                )


@contextmanager
def consuming(server, queue):
    """Take messages one by one once ``go`` is set; gives ``go`` and what was taken."""
    taken, go, stop = [], threading.Event(), threading.Event()

    def consume():
        go.wait()
        while not stop.is_set() or server.llen(queue):
            message = server.rpop(queue)
            if message is None:
                stop.wait(0.001)
            else:
                key, number = json.loads(b64decode(json.loads(message)["body"]))[0]
                taken.append((key, number))

    thread = threading.Thread(target=consume)
    thread.start()
    try:
        yield go, taken
    finally:
        stop.set()
        go.set()
        thread.join()


def inversions(taken):
    """Jobs that were accepted for the first time after a later one of their key."""
    newest, seen, found = {}, set(), []
    for key, number in taken:
        if (key, number) not in seen and number < newest.get(key, -1):
            found.append((key, number))
        seen.add((key, number))
        newest[key] = max(number, newest.get(key, -1))
    return found


@pytest.mark.parametrize("transactions", ["taken", "forbidden", "unknown", "in several slots"])
def test_out_of_memory_inverts_nothing(
    alias, transactions, private_redis, server, make_named_app, drained
):
    url = private_redis.url
    if transactions == "forbidden":
        server.acl_setuser(
            "plain", enabled=True, passwords="+secret", keys="*", channels="*",
            categories=["+@all"], commands=["-multi"],
        )  # fmt: skip
        url = url.replace("//", "//plain:secret@")
    parts = urlsplit(private_redis.url)
    with RedisProxy(parts.hostname, parts.port) as way:
        if transactions == "unknown":
            url = url.replace(f":{parts.port}", f":{way.port}")
            way.answers = {"MULTI": "ERR unknown command 'MULTI'", "EXEC": "ERR unknown command"}
        if transactions == "in several slots":
            url = url.replace(f":{parts.port}", f":{way.port}")
            way.answers = {"MULTI LPUSH": "CROSSSLOT Keys in request don't hash to the same slot"}
        app = make_named_app(url)
        stage(app, alias)
        server.config_set("maxmemory", server.info("memory")["used_memory"] + 2_000_000)
        with (
            consuming(server, app.main) as (go, taken),
            draining(alias, batch_size=400) as drainer,
        ):
            eventually(lambda: drainer.trouble, "it is full")
            go.set()
            drained(alias)

    assert inversions(taken) == []
    assert set(taken) == {(str(n % 100 % KEYS), n) for n in range(JOBS)}
    assert not DeadJob.objects.using(alias).exists()
    assert not StagedJob.objects.using(alias).exists()
