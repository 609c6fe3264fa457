"""Rows edited by hand into nonsense: each becomes dead with its reason, all others are delivered.

A damaged row must not stop the drain, or make a healthy row dead.
"""

from __future__ import annotations

import json

import django.db
import pytest
from celery.signals import after_task_publish
from django.db.models import F

from outbox_app.models import StagedJob

from .tools import dead_reasons, drain, on

pytestmark = pytest.mark.django_db(transaction=True)

#: What an envelope is replaced by.
ENVELOPES = {
    "empty": "",
    "no JSON": "nonsense",
    "a list": "[]",
    "null": "null",
    "a number": "1",
    "a NUL escape": '"\\u0000"',
    "nested deeply": "[" * 100_000,
    "an unknown name": '{"surprise": 1}',
    "headers of an unknown type": '{"headers": {"__type__": "surprise", "__value__": 1}}',
}
#: What is put into an envelope.
FIELDS = {
    "headers are text": {"headers": "x"},
    "headers are a list": {"headers": [1]},
    "properties are text": {"properties": "x"},
    "a property that is an argument": {"properties": {"confirm_timeout": 5}},
    "expires never": {"expires": "never"},
    "expires in a list": {"expires": [1]},
    "declares a number": {"declare": 5},
    "declares numbers": {"declare": [5]},
    "declares a queue of a number": {"declare": [{"queue": 5}]},
    "declares nothing known": {"declare": [{"surprise": 1}]},
    "a routing key that is no text": {"routing_key": {"a": 1}},
    "a lone surrogate": {"routing_key": "\ud800"},
    "an exchange that is a list": {"exchange": [1]},
    "an event that is a number": {"sent_event": 5},
    "an exchange nobody declares": {"exchange": "no-such-exchange", "routing_key": "x"},
}
#: What only RabbitMQ refuses, some of it by closing the connection.
RABBITMQ = {
    "headers larger than a frame": {"headers": {"x": "x" * 200_000}},
    "headers larger than any buffer": {"headers": {"x": "x" * 12_000_000}},
    "a header AMQP cannot hold": {
        "headers": {"x": {"__type__": "uuid", "__value__": {"hex": "0" * 32}}}
    },
    "an exchange type nobody has": {
        "declare": [{"exchange": {"name": "x-nonsense", "type": "x-nonsense"}}]
    },
    "a flag nobody has": {"properties": {"immediate": True}},
    "a priority beyond an octet": {"priority": 300},
    "a reply_to beyond a short string": {"properties": {"reply_to": "x" * 300}},
    "an expiration beyond all bounds": {"properties": {"expiration": 10**12}},
}


@pytest.fixture
def damage(book):
    """``damage(alias, app, fields, envelopes)``: stage jobs, and damage every second one."""

    def make(alias, app, fields, envelopes):
        jobs = book(alias)
        ids = jobs.stage(app, 2 * (len(fields) + len(envelopes)), key="key")
        rows = StagedJob.objects.using(alias)
        names = {}
        for id, (name, envelope) in zip(ids[::2], envelopes.items(), strict=False):
            rows.filter(task_id=id).update(envelope=envelope)
            names[id] = name
        for id, (name, field) in zip(ids[2 * len(envelopes) :: 2], fields.items(), strict=True):
            row = rows.get(task_id=id)
            envelope = json.dumps({**json.loads(row.envelope), **field})
            rows.filter(task_id=id).update(envelope=envelope)
            names[id] = name
        return jobs, ids[1::2], names

    return make


def check(alias, app, jobs, healthy, names):
    tally = drain(alias)
    jobs.receive(app)
    reasons = dead_reasons(alias)
    assert {names[id] for id in reasons} == set(names.values())
    assert all(reasons.values()), reasons
    assert list(dict.fromkeys(jobs.sent)) == healthy
    assert tally.dead == len(names)
    return reasons


@on("postgres", "mariadb", "default")
def test_on_redis(alias, redis_url, make_named_app, damage, quick):
    app = make_named_app(redis_url)
    jobs, healthy, names = damage(alias, app, FIELDS, ENVELOPES)
    check(alias, app, jobs, healthy, names)
    jobs.assert_complete(but=names)


@on("postgres")
def test_on_rabbitmq(alias, rabbitmq_url, make_named_app, damage, quick):
    app = make_named_app(rabbitmq_url)
    jobs, healthy, names = damage(alias, app, FIELDS | RABBITMQ, ENVELOPES)
    reasons = check(alias, app, jobs, healthy, names)
    jobs.assert_exact(but=names)  # one by one: nothing is unknown, nothing goes twice
    said = {names[id]: reason for id, reason in reasons.items()}
    assert "frame_too_large" in said["headers larger than a frame"]
    assert "no-such-exchange" in said["an exchange nobody declares"]
    assert "unknown exchange type" in said["an exchange type nobody has"]


@on("postgres")
def test_of_another_app(alias, redis_url, make_named_app, book, quick):
    app, jobs = make_named_app(redis_url), book(alias)
    ids = jobs.stage(app, 10)
    for id, name in zip(ids, ["", "nobody", "ü" * 255], strict=False):
        StagedJob.objects.using(alias).filter(task_id=id).update(app=name)
    drain(alias)
    reasons = dead_reasons(alias)
    assert set(reasons) == set(ids[:3])
    assert "No Celery app named 'nobody' is loaded" in reasons[ids[1]]
    jobs.receive(app)
    jobs.assert_exact(but=ids[:3])


@on("postgres", "mariadb", "default")
def test_a_shard_that_nobody_owns_cannot_be_written(alias, redis_url, make_named_app, book):
    """It would wait for ever, unseen: no error, no death. So the database itself refuses it."""
    jobs = book(alias)
    jobs.stage(make_named_app(redis_url), 1)
    with pytest.raises(django.db.Error):
        StagedJob.objects.using(alias).update(shard=F("shard") + 128)


@on("postgres")
def test_a_shard_that_is_another_one_s_is_no_harm(alias, redis_url, make_named_app, book, quick):
    app, jobs = make_named_app(redis_url), book(alias)
    jobs.stage(app, 10)
    StagedJob.objects.using(alias).update(shard=(F("shard") + 1) % 128)
    jobs.note()
    drain(alias)
    jobs.receive(app)
    jobs.assert_exact()


@on("postgres")
def test_a_body_is_nobody_s_business(alias, redis_url, make_named_app, book, quick):
    """Never decoded here, so never refused here; those who listen get the bytes."""
    heard = []

    def hear(body, **kwargs):
        heard.append(body)

    after_task_publish.connect(hear)
    app, jobs = make_named_app(redis_url), book(alias)
    jobs.stage(app, 2)
    StagedJob.objects.using(alias).update(body=b"\xff nonsense")
    try:
        tally = drain(alias)
    finally:
        after_task_publish.disconnect(hear)
    assert (tally.published, tally.dead) == (2, 0)
    assert heard == [b"\xff nonsense"] * 2
