"""Checks of the settings that real brokers report, and of brokers that do not answer."""

from __future__ import annotations

import socket
from urllib.parse import urlsplit
from weakref import WeakSet

import pytest
import redis
from amqp import Connection, NotFound
from celery import Celery, _state
from kombu.exceptions import OperationalError

from outbox_app.checks import servers
from outbox_app.checks.brokers import UNBOUNDED
from outbox_app.checks.servers import check_servers
from tests.faults.tools import eventually


def found(app):
    """What is said, all of it about this app."""
    messages = check_servers(databases=["default"])
    assert all(repr(app.main) in message.msg for message in messages)
    return messages


def ids(app):
    return [message.id for message in found(app)]


@pytest.fixture(autouse=True)
def apps_of_this_test(monkeypatch):
    """Check only the apps of this test: apps of other tests may be alive without their brokers."""
    monkeypatch.setattr(_state, "_apps", WeakSet())


@pytest.fixture
def server(private_redis):
    """A client of the private server. The server's settings are restored after the test."""
    with redis.Redis.from_url(private_redis.url) as client:
        client.flushall()
        yield client
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("appendonly", "yes")


def test_asked_for_with_a_database_only(server, private_redis, make_app):
    server.config_set("maxmemory-policy", "allkeys-lru")
    app = make_app(private_redis.url)
    assert ids(app) == ["outbox.E030"]
    assert check_servers(databases=None) == []
    assert check_servers(databases=[]) == []


def test_other_transports_are_not_opened(make_app):
    assert ids(make_app("memory://")) == []
    assert ids(make_app("nonsense://")) == []


class TestRedis:
    def test_as_it_should_be(self, server, private_redis, make_app):
        app = make_app(private_redis.url)
        assert ids(app) == []
        assert server.dbsize() == 0  # nothing was sent
        eventually(lambda: len(server.client_list()) == 1, "nothing is left open")

    @pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random"])
    def test_evicts(self, server, private_redis, make_app, policy):
        server.config_set("maxmemory-policy", policy)
        [message] = found(make_app(private_redis.url))
        assert message.id == "outbox.E030"
        assert f"'{policy}'" in message.msg
        assert "noeviction" in message.hint

    def test_evicts_what_has_a_ttl(self, server, private_redis, make_app):
        server.config_set("maxmemory-policy", "volatile-lru")
        [message] = found(make_app(private_redis.url))
        assert message.id == "outbox.W017"
        assert "'volatile-lru'" in message.msg

    def test_without_append_only_file(self, server, private_redis, make_app):
        server.config_set("appendonly", "no")
        assert ids(make_app(private_redis.url)) == ["outbox.W018"]

    def test_all_at_once(self, server, private_redis, make_app):
        server.config_set("appendonly", "no")
        server.config_set("maxmemory-policy", "allkeys-lfu")
        assert ids(make_app(private_redis.url)) == ["outbox.E030", "outbox.W018"]

    def test_info_forbidden(self, server, private_redis, make_app):
        server.acl_setuser(
            "silent", enabled=True, passwords="+secret", keys="*", channels="*",
            categories=["+@all"], commands=["-info"],
        )  # fmt: skip
        messages = found(make_app(private_redis.url.replace("//", "//silent:secret@")))
        assert [message.id for message in messages] == ["outbox.W016"] * 2
        assert "maxmemory-policy" in messages[0].msg
        assert "appendonly" in messages[1].msg

    def test_wrong_password(self, server, private_redis, make_app):
        app = make_app(private_redis.url.replace("//", "//nobody:secret@"))
        [message] = found(app)
        assert message.id == "outbox.W015"
        assert "secret" not in message.msg


class TestRabbitMQ:
    def test_as_it_should_be(self, rabbitmq_url, make_app):
        app = make_app(rabbitmq_url)
        assert ids(app) == []
        with app.connection_for_write() as connection, pytest.raises(NotFound):
            # nothing was declared
            connection.default_channel.queue_declare(app.main, passive=True)

    def test_without_confirms(self, rabbitmq_url, make_app, monkeypatch):
        """As a broker that speaks AMQP and has not that extension would say of itself."""
        told = Connection._on_start

        def forget(self, *args):
            told(self, *args)
            self.server_properties["capabilities"]["publisher_confirms"] = False

        monkeypatch.setattr(Connection, "_on_start", forget)
        [message] = found(make_app(rabbitmq_url))
        assert message.id == "outbox.E029"
        assert "no publisher confirms" in message.msg
        assert "guest:guest" not in message.msg

    def test_wrong_password(self, rabbitmq_url, make_app):
        app = make_app(rabbitmq_url.replace("//guest:guest@", "//guest:secret@"))
        [message] = found(app)
        assert message.id == "outbox.W015"
        assert "secret" not in message.msg


@pytest.fixture(params=["redis", "rabbitmq"])
def url(request):
    if request.param == "redis":
        return request.getfixturevalue("private_redis").url
    return request.getfixturevalue("rabbitmq_url")


@pytest.mark.parametrize("mode", ["blackhole", "drop_reply", "refuse"])
def test_a_broker_that_does_not_answer(url, mode, proxy, make_app, monkeypatch):
    """Without the bound this test would reach its own time-out."""
    monkeypatch.setattr(servers, "TIMEOUT", 0.5)
    way, through = proxy(url)
    way.mode = mode
    [message] = found(make_app(through, broker_connection_timeout=3600))
    assert message.id == "outbox.W015"
    assert f"{urlsplit(through).netloc.rpartition('@')[2]}/" in message.msg
    assert "could not be checked: OperationalError" in message.msg


def test_a_broker_that_falls_silent_later(private_redis, server, proxy, make_app, monkeypatch):
    monkeypatch.setattr(servers, "TIMEOUT", 0.5)
    way, through = proxy(private_redis.url)
    ask = servers._ask_redis

    def swallow(*arguments):
        way.mode = "blackhole"
        return ask(*arguments)

    monkeypatch.setattr(servers, "_ask_redis", swallow)
    [message] = found(make_app(through))
    assert message.id == "outbox.W015"


def test_a_broker_that_is_away(url, make_app):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        parts = urlsplit(url)
        away = url.replace(f":{parts.port}", f":{taken.getsockname()[1]}")
        assert ids(make_app(away)) == ["outbox.W015"]


def test_of_several_brokers_one_answers(private_redis, server, make_app, proxy):
    way, through = proxy(private_redis.url)
    way.mode = "refuse"
    server.config_set("appendonly", "no")
    assert ids(make_app(f"{through};{private_redis.url}")) == ["outbox.W018"]


def test_the_time_outs_that_the_hint_names_are_enough(url, proxy):
    """Plain Celery waits for ever without them; this test would reach its own time-out."""
    way, through = proxy(url)
    driver = {"redis": "redis", "amqp": "py-amqp"}[urlsplit(url).scheme]
    options = dict.fromkeys(UNBOUNDED[driver], 2)
    app = Celery("bounded", broker=through, set_as_current=False)
    app.conf.broker_transport_options = options
    with app.connection_for_write() as connection:
        producer = app.amqp.Producer(connection.default_channel)
        way.mode = "blackhole"
        with pytest.raises((OSError, redis.RedisError, OperationalError)):
            app.send_task("any", producer=producer, retry=False)
        connection.collect()
    app.close()
