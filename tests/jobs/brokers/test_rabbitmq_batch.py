"""Batches to RabbitMQ: its confirms arrive late or never, or it refuses one message of many."""

from __future__ import annotations

import pytest
from kombu import Queue

from outbox_app.jobs.drain.amqp_batch import AmqpBatch
from outbox_app.models import DeadJob, Incident, StagedJob
from tests.faults.tools import drain, draining, eventually, on

pytestmark = [
    pytest.mark.django_db(transaction=True),
    on("default"),
    pytest.mark.usefixtures("quick"),
]


@pytest.fixture
def flushed(monkeypatch):
    """``flushed``: the sizes of the batches; ``before(action)`` acts before the next one."""
    flush = AmqpBatch.flush

    class Flushed(list):
        actions = []

        def before(self, action):
            self.actions.append(action)

    made = Flushed()

    def noted(batch):
        made.append(len(batch._sent))
        while made.actions:
            made.actions.pop()()
        flush(batch)

    monkeypatch.setattr(AmqpBatch, "flush", noted)
    return made


def left(alias):
    return StagedJob.objects.using(alias).count()


def test_a_batch_is_confirmed_as_a_whole(alias, rabbitmq, make_named_app, book, flushed):
    app, jobs = make_named_app(rabbitmq.url), book(alias)
    jobs.stage(app, 300)

    assert drain(alias).published == 300

    jobs.receive(app)
    jobs.assert_exact()
    # The first one alone, as a new connection may be refused the exchange; on a slow one some more.
    [together] = flushed
    assert together > 290


def test_one_key_never_twice_in_a_batch(alias, rabbitmq, make_named_app, book, flushed):
    """A queue that is full refuses one and takes the next."""
    app, jobs = make_named_app(rabbitmq.url), book(alias)
    for _ in range(3):
        for key in ("a", "b", "c", "d"):
            jobs.stage(app, 1, key=key)

    drain(alias)

    jobs.receive(app)
    jobs.assert_exact()
    order = [(body[0], jobs.jobs[id][0]) for body, id in zip(jobs.bodies, jobs.sent, strict=True)]
    assert sorted(order) == sorted(order, key=lambda each: each[0])
    assert flushed == [3, 4, 4]


@pytest.mark.parametrize("mode", ["drop_reply", "cut_on_reply"])
def test_confirms_lost(alias, mode, rabbitmq, proxy, make_named_app, book, drained, flushed):
    way, url = proxy(rabbitmq.url)
    app, jobs = make_named_app(url), book(alias)
    jobs.stage(app, 31)
    flushed.before(lambda: setattr(way, "mode", mode))
    with draining(alias) as drainer:
        eventually(lambda: drainer.trouble, "it waits no longer")
        assert left(alias) == 30
        way.mode = "pass"
        drained(alias)

    jobs.receive(app, url=rabbitmq.url)
    jobs.assert_complete()
    assert set(jobs.twice.values()) == {1}
    assert Incident.objects.using(alias).get().kind == Incident.Kind.UNKNOWN


@pytest.mark.parametrize("mode", ["drop_reply", "cut_on_reply"])
def test_connection_lost_when_all_is_confirmed(
    alias, mode, rabbitmq, proxy, make_named_app, book, drained, monkeypatch
):
    """What was confirmed is known to be taken, whatever becomes of the channel of its batch."""
    way, url = proxy(rabbitmq.url)
    app, jobs = make_named_app(url), book(alias)
    jobs.stage(app, 31)
    close = AmqpBatch.close

    def lost(batch):
        way.mode = mode
        monkeypatch.undo()
        close(batch)

    monkeypatch.setattr(AmqpBatch, "close", lost)
    with draining(alias) as drainer:
        eventually(lambda: drainer.trouble, "it waits no longer")
        way.mode = "pass"
        drained(alias)

    jobs.receive(app, url=rabbitmq.url)
    jobs.assert_exact()


def test_late_confirms_are_credited_to_nothing(
    alias, rabbitmq, proxy, make_named_app, book, drained, flushed
):
    way, url = proxy(rabbitmq.url)
    app, jobs = make_named_app(url), book(alias)
    jobs.stage(app, 31)
    way.delay = 0.7  # there and back again: more than the timeout
    flushed.before(lambda: setattr(way, "mode", "delay"))
    with draining(alias) as drainer:
        eventually(lambda: drainer.trouble, "it waits no longer")
        eventually(lambda: way.accepted > 1, "the connection was dropped")
        # Confirms of what was sent before arrive now; the new connection swallows.
        way.mode = "blackhole"
        trouble = drainer._apps[app.main].backoff
        eventually(lambda: trouble.failures > 2, "it tried again")
        assert left(alias) == 30
        way.mode = "pass"
        drained(alias)

    jobs.receive(app, url=rabbitmq.url)
    jobs.assert_complete()
    assert Incident.objects.using(alias).exists()


def test_unroutable_in_the_middle(alias, rabbitmq, make_named_app, book, flushed):
    app, jobs = make_named_app(rabbitmq.url), book(alias)
    bound = {"exchange": app.main, "routing_key": app.main}
    jobs.stage(app, 10, **bound)
    unroutable = jobs.stage(app, 2, **{**bound, "routing_key": "nowhere"})
    jobs.stage(app, 10, **bound)

    tally = drain(alias)

    assert (tally.published, tally.dead, flushed) == (20, 2, [21])
    jobs.receive(app)
    jobs.assert_exact(but=unroutable)
    dead = DeadJob.objects.using(alias)
    assert set(dead.values_list("task_id", flat=True)) == set(unroutable)
    assert all("NO_ROUTE" in job.reason for job in dead)


def test_channel_closed_in_the_middle(alias, rabbitmq, make_named_app, book, flushed):
    """RabbitMQ does not say of which message it speaks: the rest go one by one."""
    app, jobs = make_named_app(rabbitmq.url), book(alias)
    jobs.stage(app, 10)
    [refused] = jobs.stage(app, 1, headers={"CC": "no list"})
    jobs.stage(app, 10)

    tally = drain(alias)

    assert (tally.published, tally.dead, flushed) == (20, 1, [20])
    dead = DeadJob.objects.using(alias).get()
    assert (dead.task_id, "PRECONDITION_FAILED" in dead.reason) == (refused, True)
    jobs.receive(app)
    jobs.assert_complete(but=[refused])
    assert set(jobs.twice.values()) <= {1}
    assert Incident.objects.using(alias).get().kind == Incident.Kind.UNKNOWN


def test_no_job_overtakes_one_that_was_nacked_before_the_channel_closed(
    alias, rabbitmq, make_named_app, book
):
    app, jobs = make_named_app(rabbitmq.url), book(alias)
    full = {"x-max-length": 1, "x-overflow": "reject-publish"}
    app.conf.task_queues = [Queue(app.main), Queue(f"full-{app.main}", queue_arguments=full)]
    jobs.stage(app, 1, queue=f"full-{app.main}")  # fills it
    jobs.stage(app, 1)
    assert drain(alias).published == 2
    jobs.stage(app, 1)  # goes alone
    jobs.stage(app, 1, queue=f"full-{app.main}", key="a")
    jobs.stage(app, 300)
    jobs.stage(app, 1, headers={"CC": "no list"})
    jobs.stage(app, 1, key="a")

    with draining(alias) as drainer:
        eventually(lambda: "nack" in drainer.trouble.lower(), "it is refused")

    assert list(StagedJob.objects.using(alias).values_list("ordering_key", flat=True)) == ["a", "a"]


def test_connection_blocked(alias, rabbitmq, make_named_app, book, drained, at):
    """What waits in the socket is taken when the alarm is over: once, however often it tried."""
    app, jobs = make_named_app(rabbitmq.url), book(alias)
    jobs.stage(app, 31)

    def alarm():
        rabbitmq.control("set_vm_memory_high_watermark", "0.00001")

    at("checked", 3, alarm)  # after the declaration, and the first job
    try:
        with draining(alias, lease_seconds=60) as drainer:
            eventually(lambda: drainer.trouble, "it waits no longer")
            trouble = drainer._apps[app.main].backoff
            eventually(lambda: trouble.failures > 2, "it tried again")
            assert left(alias) == 30
            rabbitmq.control("set_vm_memory_high_watermark", "0.4")
            drained(alias)
    finally:
        rabbitmq.control("set_vm_memory_high_watermark", "0.4")

    jobs.receive(app)
    jobs.assert_complete()
    assert not DeadJob.objects.using(alias).exists()
    assert set(jobs.twice.values()) <= {1}
    assert Incident.objects.using(alias).count() == 1
