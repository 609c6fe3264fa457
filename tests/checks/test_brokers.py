"""Checks of broker settings with `check --deploy`; they connect to no broker."""

from __future__ import annotations

import re
from uuid import uuid4
from weakref import WeakSet

import pytest
from celery import Celery, _state
from kombu import Producer
from kombu.transport import pyamqp

from outbox_app.checks.brokers import check_brokers, check_transports
from tests import tasks

REDIS = {"socket_timeout": 30}
AMQP = {"read_timeout": 30, "write_timeout": 30}


def found(app):
    """What is said, all of it about this app."""
    messages = list(check_brokers())
    assert all(repr(app.main) in message.msg for message in messages)
    return messages


def ids(app):
    return [message.id for message in found(app)]


@pytest.fixture(autouse=True)
def nothing_of_other_tests(monkeypatch):
    """Hide the apps of other tests, and the tasks that ``@shared_task`` defined for every app."""
    monkeypatch.setattr(_state, "_apps", WeakSet())
    monkeypatch.setattr(Producer, "batch", None, raising=False)  # kombu 5.7 has it
    own = {each for each in _state._on_app_finalizers if each.__module__ == "celery.app.builtins"}
    monkeypatch.setattr(_state, "_on_app_finalizers", own)


@pytest.fixture
def make(make_app):
    """``make(url, **conf)``: an app without findings, apart from these settings."""

    def make(url, **conf):
        options = {"redis": REDIS, "amqp": AMQP}.get(re.match("[a-z]*", url)[0], {})
        good = {
            "broker_transport_options": options,
            "task_acks_late": True,
            "task_default_queue_type": "quorum",
        }
        return make_app(url, **{**good, **conf})

    return make


@pytest.fixture
def define():
    """``define(app, **options)``: the name of a new task of that app."""

    def define(app, **options):
        name = f"add-{uuid4().hex[:8]}"
        app.task(name=name, shared=False, **options)(tasks.add)
        return name

    return define


@pytest.mark.parametrize("url", ["redis://h", "redis+socket:///tmp/r", "amqp://h", "memory://"])
def test_an_app_that_is_well(make, define, url):
    app = make(url)
    define(app)
    assert ids(app) == []
    assert not list(check_transports())


def test_plain_apps_are_not_ours():
    app = Celery(f"plain-{uuid4()}", broker="redis://h", set_as_current=False)
    assert not list(check_brokers())
    app.close()


@pytest.mark.parametrize("url", ["nonsense://me:secret@h", "redis://h:secret/0"])
def test_a_broker_that_nobody_knows(make, url):
    app = make(url)
    [message] = check_transports()
    assert message.id == "outbox.E033"
    assert repr(app.main) in message.msg
    assert "secret" not in message.msg + message.hint
    assert found(app) == []


def test_library_of_the_transport_is_missing(make):
    make("mongodb://me:secret@h")
    [message] = check_transports()
    assert message.id == "outbox.W028"
    assert "library of its transport is missing" in message.msg
    assert "secret" not in message.msg + message.hint


class TestTimeouts:
    @pytest.mark.parametrize("options", [{}, {"socket_timeout": None}, {"visibility_timeout": 9e9}])
    def test_redis(self, make, options):
        [message] = found(make("redis://h", broker_transport_options=options))
        assert message.id == "outbox.W052"
        assert "have no socket_timeout:" in message.msg
        assert message.hint == 'Add "socket_timeout": 30 to broker_transport_options.'

    @pytest.mark.parametrize(
        ("options", "missing"),
        [
            ({}, '"read_timeout": 30, "write_timeout": 30'),
            ({"read_timeout": 4}, '"write_timeout": 30'),
            ({"write_timeout": 4, "read_timeout": 0}, '"read_timeout": 30'),
        ],
    )
    def test_rabbitmq(self, make, options, missing):
        [message] = found(make("amqp://h", broker_transport_options=options))
        assert message.id == "outbox.W052"
        assert message.hint == f"Add {missing} to broker_transport_options."


class TestConfirms:
    def test_turned_off(self, make):
        app = make("amqp://h", broker_transport_options={**AMQP, "confirm_publish": False})
        [message] = found(app)
        assert message.id == "outbox.E029"
        assert "turn publisher confirms off" in message.msg

    def test_turned_on(self, make):
        app = make("amqp://h", broker_transport_options={**AMQP, "confirm_publish": True})
        assert ids(app) == []

    def test_another_driver(self, make, monkeypatch):
        monkeypatch.setattr(pyamqp.Transport, "driver_name", "librabbitmq")
        [message] = found(make("amqp://h"))
        assert message.id == "outbox.E029"
        assert "transport librabbitmq" in message.msg


class TestVisibility:
    """One hour by default, and a worker holds a job for up to HOLD_HORIZON before it is due."""

    @pytest.fixture(autouse=True)
    def horizon(self, settings):
        settings.OUTBOX = {**settings.OUTBOX, "HOLD_HORIZON": 300.0}

    @pytest.mark.parametrize(
        ("url", "conf", "fits"),
        [
            ("redis://h", {"task_time_limit": 3300}, True),
            ("redis://h", {"task_time_limit": 3301}, False),
            ("redis://h", {"task_soft_time_limit": 3301}, False),
            ("redis://h", {"task_time_limit": 9999, "task_acks_late": False}, True),
            ("redis://h", {"broker_transport_options": {**REDIS, "visibility_timeout": 300}}, True),
            (
                "redis://h",
                {"broker_transport_options": {**REDIS, "visibility_timeout": 299}},
                False,
            ),
            ("sqs://", {"task_time_limit": 1501}, False),
            ("sqs://", {"task_time_limit": 1500}, True),
            ("amqp://h", {"task_time_limit": 9999}, True),
        ],
    )
    def test_limits_of_the_app(self, make, monkeypatch, url, conf, fits):
        if url == "sqs://":  # without its library
            monkeypatch.setattr("kombu.transport.memory.Transport.driver_type", "sqs")
            url = "memory://"
        assert ids(make(url, **conf)) == ([] if fits else ["outbox.W020"])

    def test_limit_of_a_task(self, make, define):
        app = make("redis://h")
        define(app, time_limit=3000)
        slow = define(app, time_limit=14 * 86400 + 4)
        [message] = found(app)
        assert message.id == "outbox.W020"
        assert f"and task {slow!r} may take 1209604:" in message.msg
        assert '"visibility_timeout": 1209904 or more' in message.hint

    def test_soft_limit_of_a_task(self, make, define):
        app = make("redis://h")
        define(app, soft_time_limit=7200)
        assert ids(app) == ["outbox.W020"]

    def test_a_task_that_is_acknowledged_early_may_take_its_time(self, make, define):
        app = make("redis://h")
        define(app, time_limit=7200, acks_late=False)
        assert ids(app) == []

    def test_the_horizon_alone(self, make, settings):
        settings.OUTBOX = {**settings.OUTBOX, "HOLD_HORIZON": 7200.0}
        [message] = found(make("redis://h"))
        assert message.id == "outbox.W020"
        assert "may take" not in message.msg


def test_kombu_without_batches(monkeypatch):
    monkeypatch.delattr(Producer, "batch")
    [message] = check_brokers()
    assert message.id == "outbox.W038"
    assert re.search(r"kombu [\d.]+ publishes each job singly", message.msg)
