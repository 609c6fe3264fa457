"""Error replies about the broker's state, from Redis or from a proxy, lose no job."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from urllib.parse import urlsplit

import pytest

from outbox_app.exceptions import BrokerUnavailable
from outbox_app.jobs.drain.publisher import Publisher
from outbox_app.models import DeadJob, Incident, StagedJob
from tests.faults.tools import draining, eventually, on

from .redis_proxy import RedisProxy

pytestmark = [
    pytest.mark.django_db(transaction=True),
    on("default"),
    pytest.mark.usefixtures("quick"),
]


@pytest.fixture
def front(redis_url):
    """``front``: a proxy in front of Redis, and the proxy's address."""
    parts = urlsplit(redis_url)
    with ExitStack() as stack:
        way = stack.enter_context(RedisProxy(parts.hostname, parts.port))
        yield way, redis_url.replace(f":{parts.port}", f":{way.port}")


@pytest.mark.parametrize(
    "answer",
    [
        "no upstream host",
        "upstream failure",
        "ERR Connection refused",
        "ERR unavailable, try again later",
        "ERR proxy: backend closed the connection",
        "NOREPLICAS Not enough good replicas to write.",
        "NOPERM User outbox has no permissions to run the 'lpush' command",
    ],
)
def test_answers_of_a_state_cost_no_job(alias, answer, front, make_named_app, book, drained):
    way, url = front
    app, jobs = make_named_app(url), book(alias)
    jobs.stage(app, 10)
    way.answers = {"LPUSH": answer, "LPUSHX": answer}
    with draining(alias) as drainer:
        eventually(lambda: drainer.trouble, "it notices")
        trouble = drainer._apps[app.main].backoff
        eventually(lambda: trouble.failures > 3, "it tries again")
        assert answer.removeprefix("ERR ").removeprefix("NOPERM ") in drainer.trouble
        assert StagedJob.objects.using(alias).count() == 10
        # Only the attempts that met it first are in doubt: then it is probed before it is used.
        assert Incident.objects.using(alias).count() <= 1
        way.answers = {}
        drained(alias)

    jobs.receive(app)
    jobs.assert_complete()
    assert not jobs.twice
    assert not DeadJob.objects.using(alias).exists()


def test_states_met_by_a_declaration(alias, front, make_named_app, book, drained):
    way, url = front
    app, jobs = make_named_app(url), book(alias)
    jobs.stage(app, 5, exchange=app.main, routing_key=app.main)
    way.answers = dict.fromkeys(["SADD", "SMEMBERS", "EVALSHA"], "upstream failure")
    with draining(alias) as drainer:
        eventually(lambda: "upstream failure" in drainer.trouble, "it notices")
        way.answers = {}
        drained(alias)

    jobs.receive(app)
    jobs.assert_exact()


def test_a_sentinel_that_says_nothing_is_asked_once(alias, make_app):
    """With options of the project's own for its client, which bound nothing."""
    with socket.create_server(("127.0.0.1", 0)) as sentinel:
        app = make_app(f"sentinel://127.0.0.1:{sentinel.getsockname()[1]}")
        own = {"password": "secret", "socket_timeout": 1}
        app.conf.broker_transport_options = {"master_name": "m", "sentinel_kwargs": own}
        with pytest.raises(BrokerUnavailable, match="No master found"):
            Publisher(app, timeout=0.1).open()
        sentinel.setblocking(False)
        sentinel.accept()[0].close()
        with pytest.raises(BlockingIOError):
            sentinel.accept()
