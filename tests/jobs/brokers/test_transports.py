"""Any other kombu transport: plain publishes, one by one, without broker-specific code."""

from __future__ import annotations

import gc
import json
from collections import Counter

import pytest
from django.db import transaction
from kombu import Exchange, Producer, Queue
from kombu.transport import TRANSPORT_ALIASES, memory

import example_project.celery  # noqa: F401  # makes embedded:// a broker URL
from outbox_app.exceptions import InvalidJob
from outbox_app.jobs.drain.drain import Drain
from outbox_app.jobs.drain.outcome import PublishResult
from outbox_app.models import StagedJob
from outbox_app.process import backoff
from tests.faults.tools import drain, draining, eventually, on

pytestmark = [
    pytest.mark.django_db(transaction=True),
    on("default"),
    pytest.mark.usefixtures("quick"),
]


def options(transport, folder):
    (folder / "in").mkdir()
    files = {"data_folder_in": "in", "data_folder_out": "in", "control_folder": "control"}
    return {
        "memory": {},
        "filesystem": {name: folder / each for name, each in files.items()},
        "embedded": {"folder": folder},
    }[transport]


@pytest.mark.parametrize("transport", ["memory", "filesystem", "embedded"])
def test_delivers(alias, transport, tmp_path, make_named_app, book):
    app, jobs = make_named_app(f"{transport}://"), book(alias)
    app.conf.broker_transport_options = options(transport, tmp_path)
    jobs.stage(app, 200)
    jobs.stage(app, 20, key="k")

    assert drain(alias, batch_size=50).published == 220

    jobs.receive(app)
    jobs.assert_exact()
    keyed = [i for key, i in jobs.bodies if key == "k"]
    if transport == "filesystem":  # it has no order within a millisecond
        keyed.sort()
    assert keyed == list(range(20))


class Answer(Exception):
    """An error of a transport's library, of which nothing is known here."""


class Channel(memory.Channel):
    #: Say no to all messages, or to those of these ids.
    is_away = False
    refused = ()
    asked = Counter()

    def _put(self, queue, message, **kwargs):
        id = message["headers"]["id"]
        self.asked[id] += 1
        if self.is_away or id in self.refused:
            raise Answer("Access to the queue is denied.")
        super()._put(queue, message, **kwargs)


class Transport(memory.Transport):
    Channel = Channel


@pytest.fixture
def answering(monkeypatch):
    monkeypatch.setitem(TRANSPORT_ALIASES, "answering", f"{__name__}:Transport")
    monkeypatch.setattr(Channel, "asked", Counter())
    return monkeypatch


def test_nothing_dies_while_the_broker_says_no_to_all(
    alias, answering, make_named_app, book, drained
):
    """Credentials that have expired, say."""
    app, jobs = make_named_app("answering://"), book(alias)
    answering.setattr(Channel, "is_away", True)
    jobs.stage(app, 20)
    with draining(alias) as drainer:
        eventually(lambda: max(Channel.asked.values(), default=0) > 3, "it tried again")
        assert "Answer: Access to the queue is denied." in drainer.trouble
        assert StagedJob.objects.using(alias).count() == 20
        Channel.is_away = False
        drained(alias)
        assert drainer.tally.dead == 0

    jobs.receive(app)
    jobs.assert_complete()


def results_in_memory():
    gc.collect()
    return sum(type(each) is PublishResult for each in gc.get_objects())


def test_a_batch_that_fails_does_not_stay_in_memory(
    alias, answering, make_named_app, book, monkeypatch
):
    """A thousand attempts at a thousand jobs, in an hour without access."""
    monkeypatch.setattr(backoff, "MAX_BACKOFF", 0.0)
    app, jobs = make_named_app("answering://"), book(alias)
    answering.setattr(Channel, "is_away", True)
    jobs.stage(app, 5)
    before = results_in_memory()  # of other tests
    drainer = Drain(using=alias)
    for _ in range(5):
        drainer.run_once()
    drainer.holder.leave()
    assert len(Channel.asked) == 5
    assert results_in_memory() <= before + 1


def test_what_the_broker_does_not_take_dies_when_others_were_taken(
    alias, answering, make_named_app, book, buried, drained
):
    app, jobs = make_named_app("answering://"), book(alias)
    [refused] = jobs.stage(app, 1)
    answering.setattr(Channel, "refused", {refused})
    with draining(alias):
        for _ in range(4):
            jobs.stage(app, 5)
            eventually(lambda: StagedJob.objects.using(alias).count() <= 1, "the others leave")
        drained(alias)

    assert "Access to the queue is denied." in buried(alias)[refused]
    jobs.receive(app)
    jobs.assert_complete(but=[refused])


def test_routes_outlive_a_connection(alias, redis_url, make_named_app, book, buried, monkeypatch):
    """A message that is refused costs the connection, and what kombu knows of exchanges."""
    monkeypatch.delattr(Producer, "supports_batch_publish")  # as of older kombu
    app, jobs = make_named_app(redis_url), book(alias)
    topics = Exchange(f"{app.main}-topics", "topic")
    app.amqp.queues.add(Queue(app.main, topics, "news.#"))
    [bad] = jobs.stage(app, 1, exchange="", routing_key="x")
    row = StagedJob.objects.using(alias).get(task_id=bad)
    row.envelope = json.dumps({**json.loads(row.envelope), "routing_key": "\ud800"})
    row.save(using=alias)
    jobs.stage(app, 5, queue=app.main, routing_key="news.today")

    drain(alias)

    assert "surrogates not allowed" in buried(alias)[bad]
    jobs.receive(app)
    jobs.assert_exact(but=[bad])


def test_a_drainer_knows_a_configured_exchange_of_which_it_has_declared_no_queue(
    alias, redis_url, make_named_app, book
):
    app, jobs = make_named_app(redis_url), book(alias)
    name = f"{app.main}-topics"
    app.conf.task_queues = [Queue(app.main), Queue(name, Exchange(name, "topic"), "news.#")]
    del app.amqp.queues, app.amqp.router
    with app.connection_for_write() as connection:
        channel = connection.default_channel
        app.amqp.queues[name](channel).declare()
        del channel.state.exchanges[name]  # a worker did, in another process
    jobs.stage(app, 2, exchange=name, routing_key="news.today")

    drain(alias)

    jobs.receive(app, name)
    jobs.assert_exact()


def test_a_refused_call_with_a_queue_that_is_no_text_stops_no_other_job(
    alias, redis_url, make_named_app, book
):
    """Celery keeps a queue of that name in the process, which may also publish."""
    app, jobs = make_named_app(redis_url), book(alias)
    with transaction.atomic(using=alias), pytest.raises(InvalidJob, match="queue must be a string"):
        app.tasks["note"].apply_async(("", 1), queue=5)
    assert 5 in app.amqp.queues
    jobs.stage(app, 2)

    drain(alias)

    jobs.receive(app)
    jobs.assert_exact()
