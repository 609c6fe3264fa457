"""URLs of brokers are shown without their secrets, in every form of URL."""

from __future__ import annotations

import socket

import pytest

from outbox_app.exceptions import BrokerUnavailable
from outbox_app.jobs.drain.misconfiguration import public_url
from outbox_app.jobs.drain.publisher import Publisher


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("redis://h:6379/0", "redis://h:6379/0"),
        ("redis://me:secret@h:6379/0", "redis://me:**@h:6379/0"),
        ("redis://secret@h", "redis://:**@h"),
        ("redis://:sec/ret@h/0", "redis://:**@h/0"),
        ("redis://:s@cret@h/0", "redis://:**@h/0"),
        ("redis://h/0?password=secret", "redis://h/0"),
        ("redis://me:secret", "redis://**"),
        ("me:secret@h", "me:**@h"),
        ("amqp://me:secret@a//;amqp://me:secret@b//", "amqp://me:**@a//;amqp://me:**@b//"),
        (["amqp://me:secret@a/v", "amqp://b"], "amqp://me:**@a/v;amqp://b"),
        ("sqla+sqlite:///jobs.db", "sqla+sqlite:///jobs.db"),
    ],
)
def test_url_without_its_secret(url, shown, make_app):
    app = make_app()
    app.conf.broker_url = url
    assert public_url(app) == shown


def test_a_broker_that_does_not_answer_is_named(make_app):
    """The library says no more than "timed out"."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        place = f"127.0.0.1:{server.getsockname()[1]}//"
        publisher = Publisher(make_app(f"amqp://me:secret@{place}"), timeout=0.1)
        with pytest.raises(BrokerUnavailable, match="time") as raised:
            publisher.open()
        assert f"at amqp://me:**@{place} cannot be reached" in str(raised.value)
        assert "secret" not in str(raised.value)
        with pytest.raises(BrokerUnavailable) as raised:
            publisher._fail(TimeoutError("timed out"), [])
        assert f"at amqp://me:**@{place} failed: TimeoutError: timed out" in str(raised.value)


def test_each_of_two_addresses_is_tried(make_app):
    app = make_app("amqp://me:secret@127.0.0.1:1//;amqp://me:secret@127.0.0.1:2//")
    tried = []
    with pytest.raises(BrokerUnavailable, match="cannot be reached"):
        Publisher(app, timeout=0.1).open(lambda: tried.append(1))
    assert tried == [1]
    with pytest.raises(BrokerUnavailable, match="cannot be reached"):
        Publisher(app, timeout=0.1).open()
