"""Redis's replies to the messages of a batch: for several queues, and without a transaction."""

from __future__ import annotations

import json
from contextlib import closing
from urllib.parse import urlsplit
from uuid import UUID

import pytest
import redis
from django.db import transaction
from django.utils import timezone
from kombu import Exchange, Producer, Queue

from outbox_app import stage_many
from outbox_app.jobs.drain.batch import BatchReader
from outbox_app.jobs.drain.outcome import PublishResult, decode_rows
from outbox_app.jobs.drain.redis_batch import RedisBatch
from outbox_app.models import DeadJob, Incident
from tests.faults.tools import drain, draining, on

from .redis_proxy import RedisProxy

pytestmark = [
    pytest.mark.django_db(transaction=True),
    on("default"),
    pytest.mark.usefixtures("quick"),
]


@pytest.fixture
def server(redis_url):
    with redis.Redis.from_url(redis_url) as client:
        yield client


def test_each_queue_has_to_take_it(alias, redis_url, server, make_named_app, book, buried):
    """A message for two queues is not accepted because one of them has it."""
    app, jobs = make_named_app(redis_url), book(alias)
    exchange = Exchange(f"{app.main}-both", type="direct")
    with app.connection_for_write() as connection:
        for name in ("one", "other"):
            Queue(f"{app.main}-{name}", exchange, "both")(connection.default_channel).declare()
    for name in ("one", "other"):  # whichever comes first
        server.delete(f"{app.main}-one", f"{app.main}-other")
        server.set(f"{app.main}-{name}", "no list")
        [job] = jobs.stage(app, 1, exchange=exchange.name, routing_key="both")

        drain(alias)

        assert "WRONGTYPE" in buried(alias)[job]
        # The other queue has taken it: whoever requeues the job sends it there again.
        incident = Incident.objects.using(alias).latest("pk")
        assert (incident.kind, incident.detail) == ("unknown", "One of a batch was refused.")
        row, shard = jobs.jobs[job]
        assert (incident.first_id, incident.last_id, incident.shards) == (row, row, [shard])


def test_blocked_key_in_several_queues(alias, redis_url, server, make_named_app, settings, buried):
    """None overtakes a job that its queue refuses, in the same batch neither."""
    settings.OUTBOX = {**settings.OUTBOX, "DEAD_KEY": "block"}
    app = make_named_app(redis_url)
    note, wrong = app.tasks["note"], f"{app.main}-wrong"
    server.set(wrong, "no list")
    with transaction.atomic(using=alias):
        routes = [app.main, wrong, app.main, app.main]
        signatures = (note.s("k", n).set(queue=queue) for n, queue in enumerate(routes))
        stage_many(signatures, using=alias, ordering_key="k")

    tally = drain(alias)

    assert (tally.published, tally.dead, server.llen(app.main)) == (1, 3, 1)
    errors = DeadJob.objects.using(alias).order_by("staged_id").values_list("error", flat=True)
    assert ["KeyBlocked" in error for error in errors] == [False, True, True]


def test_transactions_that_are_refused_later(alias, redis_url, make_named_app, book, drained):
    """What Redis took command by command is known to be taken, and is not sent again."""
    parts = urlsplit(redis_url)
    with RedisProxy(parts.hostname, parts.port) as way:
        app = make_named_app(redis_url.replace(f":{parts.port}", f":{way.port}"))
        jobs = book(alias)
        with draining(alias):
            jobs.stage(app, 10, key="k")
            drained(alias)
            way.answers = {"MULTI": "NOPERM no permissions", "EXEC": "ERR EXEC without MULTI"}
            jobs.stage(app, 10, key="k")
            drained(alias)
            jobs.stage(app, 10, key="k")
            drained(alias)

        assert "MULTI" in way.answered
        way.answers = {}
        jobs.receive(app)
        assert jobs.sent == list(jobs.jobs)
        jobs.assert_exact()


def test_time_of_a_batch_begins_with_its_connection(alias, redis_url, make_named_app, server):
    """One whose time was over before it was sent may come after the lease: it is not sent."""
    app = make_named_app(redis_url)
    with app.connection_for_write() as connection:
        channel = connection.channel()
        with closing(RedisBatch(channel, seconds=0.0, atomic=False)) as batch:
            channel.create_publish_batch = lambda max_size: batch
            producer = Producer(channel, auto_declare=False)
            with pytest.raises(TimeoutError), producer.batch(max_size=10):
                producer.publish("x", routing_key=app.main)

    assert not batch.begun
    assert server.llen(app.main) == 0


def test_messages_are_those_of_kombus_producer(alias, redis_url, make_named_app, server):
    """Those that go without it, and those with a property that only it knows."""
    app = make_named_app(redis_url)
    note = app.tasks["note"]
    options = [{}, {"priority": 5}, {"expires": 3600}, {"compression": "gzip"}, {"user_id": "u"}]
    with transaction.atomic(using=alias):
        options += [{"headers": {"x-ü": [{}, '\\"'], "properties": {"properties": 1}}}, {}]
        for number, given in enumerate(options):
            note.apply_async(("k", number), **given)
        for task_id in ("\\", 'a"b', "ü", "note", "0", "utf-8", app.main, ', "properties": {}'):
            note.apply_async(("k", 0), task_id=task_id)
    rows = BatchReader(using=alias, app=app.main, batch_size=10_000).read(range(128))
    prepared = decode_rows(rows, app, now=timezone.now(), outcome=PublishResult())
    queues = [app.main, f"{app.main}\x06\x163", f"{app.main}\x06\x166"]

    tags = []

    def arrived():
        found = [json.loads(each) for queue in queues for each in server.lrange(queue, 0, -1)]
        server.delete(*queues)
        for each in found:
            tags.append(UUID(each["properties"].pop("delivery_tag")))
        return found

    with app.connection_for_write() as connection:
        producer = Producer(connection.channel(), auto_declare=False)
        for item in prepared:
            producer.publish(item.row.body, **item.options)
    assert sum(item.alike is prepared[0].alike for item in prepared) >= 3
    expected = arrived()
    assert len(expected) == len(rows) == 15

    drain(alias)

    tags.clear()
    found = arrived()
    for each in (*expected, *found):  # its seconds go by the time at which it is sent
        assert int(each["properties"].pop("expiration", 3_600_000)) > 3_000_000
    assert found == expected
    assert len(set(tags)) == 15, "the tags of one worker must differ"
