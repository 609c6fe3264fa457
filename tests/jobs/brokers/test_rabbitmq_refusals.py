"""RabbitMQ refuses one message, or a declaration; the rest of the batch goes on."""

from __future__ import annotations

import math
from datetime import UTC, datetime

import pytest
from amqp.exceptions import PreconditionFailed
from kombu import Exchange, Queue
from kombu.common import Broadcast

from outbox_app.jobs.drain.drain import Drain
from outbox_app.models import DeadJob, StagedJob
from outbox_app.process import backoff
from tests.faults.tools import drain, draining, eventually, on
from tests.patience import patience

pytestmark = [
    pytest.mark.django_db(transaction=True),
    on("default"),
    pytest.mark.usefixtures("quick"),
]


def refused_among_others(alias, app, jobs, **options):
    """Stage one job with these options among others, and drain. Returns what it died of."""
    jobs.stage(app, 5)
    [refused] = jobs.stage(app, 1, **options)
    jobs.stage(app, 5)

    tally = drain(alias)

    assert (tally.published, tally.dead) == (10, 1)
    jobs.receive(app)
    jobs.assert_exact(but=[refused])
    dead = DeadJob.objects.using(alias).get()
    assert dead.task_id == refused
    return f"{dead.error}: {dead.reason}"


def test_unroutable(alias, rabbitmq, make_named_app, book):
    app, jobs = make_named_app(rabbitmq.url), book(alias)
    reason = refused_among_others(alias, app, jobs, exchange="amq.topic", routing_key="nowhere")
    assert "NO_ROUTE" in reason


def test_exchange_does_not_exist(alias, rabbitmq, make_named_app, book):
    app, jobs = make_named_app(rabbitmq.url), book(alias)
    reason = refused_among_others(alias, app, jobs, exchange="missing", routing_key="x")
    assert "NOT_FOUND - no exchange 'missing'" in reason


@pytest.mark.parametrize("value", [math.nan, [{"x": -math.inf}]])
def test_number_that_it_cannot_read(alias, value, rabbitmq, make_named_app, book):
    """It closes the connection with 541, as if the fault were its own."""
    app, jobs = make_named_app(rabbitmq.url), book(alias)
    reason = refused_among_others(alias, app, jobs, headers={"ratio": value})
    assert "NaN or infinite, which RabbitMQ cannot read" in reason


def test_a_time_to_live_that_it_refuses(alias, rabbitmq, make_named_app, book):
    """A job that expires "never" was dead, and others of its batch were sent twice."""
    app, jobs = make_named_app(rabbitmq.url), book(alias)
    jobs.stage(app, 5)
    jobs.stage(app, 1, expires=datetime(9999, 12, 31, tzinfo=UTC))
    jobs.stage(app, 5)
    assert drain(alias).published == 11
    jobs.receive(app)
    jobs.assert_exact()


def test_larger_than_the_broker_takes(alias, rabbitmq, make_named_app, book):
    app, jobs = make_named_app(rabbitmq.url), book(alias)
    # The size of the body counts: an errback is part of it.
    link = app.signature("note", args=("x" * 100_000, 0))
    reason = refused_among_others(alias, app, jobs, link_error=link)
    assert "PRECONDITION_FAILED" in reason
    assert "larger than configured max size 65536" in reason


def test_queue_exists_with_other_arguments(alias, rabbitmq, make_named_app, book, caplog):
    app, jobs = make_named_app(rabbitmq.url), book(alias)
    other = Queue(app.main, Exchange(app.main), app.main, queue_arguments={"x-max-priority": 5})
    with app.connection_for_write() as connection:
        other(connection.default_channel).declare()
    app.conf.task_queues = [other]  # to receive; what drains declares otherwise
    drained_by = make_named_app(rabbitmq.url)
    drained_by.conf.task_default_queue = app.main
    jobs.stage(drained_by, 10)

    assert drain(alias).published == 10

    jobs.receive(app)
    jobs.assert_exact()
    [warning] = [m for m in caplog.messages if "Declaring failed" in m]
    assert app.main in warning
    assert "PRECONDITION_FAILED" in warning


def test_full_queue_nacks(alias, rabbitmq, make_named_app, book, drained):
    app, jobs = make_named_app(rabbitmq.url), book(alias)
    full = {"x-max-length": 5, "x-overflow": "reject-publish"}
    app.conf.task_queues = [Queue(app.main, queue_arguments=full)]
    jobs.stage(app, 12)
    with draining(alias) as drainer:
        eventually(lambda: "nack" in drainer.trouble.lower(), "it is refused")
        trouble = drainer._apps[app.main].backoff
        eventually(lambda: trouble.failures > 2, "it tries again")
        assert StagedJob.objects.using(alias).count() == 7
        eventually(lambda: jobs.receive(app) and not StagedJob.objects.using(alias).exists())

    jobs.receive(app)
    jobs.assert_exact()
    assert not DeadJob.objects.using(alias).exists()


def test_once_does_not_give_up_while_some_jobs_leave(
    alias, rabbitmq, make_named_app, book, drained, monkeypatch
):
    """Each attempt ends with an error, but the queue has taken a job before."""
    monkeypatch.setattr(backoff, "MAX_BACKOFF", 0.001)
    app, jobs = make_named_app(rabbitmq.url), book(alias)
    full = {"x-max-length": 1, "x-overflow": "reject-publish"}
    app.conf.task_queues = [Queue(app.main, queue_arguments=full)]
    jobs.stage(app, 12)
    lease = patience()

    def receive(drainer):
        jobs.receive(app)
        drainer._idle_since -= lease / 4  # as if a turn took that long

    drainer = Drain(using=alias, lease_seconds=lease, on_turn=receive)
    assert drainer.run(once=True).published == 12
    assert not drainer.has_failed


def test_drain_declares_a_quorum_queue(alias, rabbitmq, make_named_app, book):
    app, jobs = make_named_app(rabbitmq.url), book(alias)
    quorum = {"x-queue-type": "quorum"}
    app.conf.task_queues = [Queue(app.main, queue_arguments=quorum)]
    jobs.stage(app, 10)

    assert drain(alias).published == 10

    jobs.receive(app)
    jobs.assert_exact()
    with (
        app.connection_for_write() as connection,
        pytest.raises(PreconditionFailed, match="x-queue-type"),
    ):
        Queue(app.main)(connection.channel()).queue_declare()


def test_priorities(alias, rabbitmq, make_named_app, book):
    app, jobs = make_named_app(rabbitmq.url), book(alias)
    app.conf.task_queues = [Queue(app.main, max_priority=9)]
    low, high, middle = (jobs.stage(app, 2, priority=priority) for priority in (1, 9, 5))

    drain(alias)

    sent = jobs.receive(app)
    assert [set(sent[:2]), set(sent[2:4]), set(sent[4:])] == [set(high), set(middle), set(low)]
    jobs.assert_exact()


def test_broadcast_that_nobody_listens_to(alias, rabbitmq, make_named_app, book):
    app, jobs = make_named_app(rabbitmq.url), book(alias)
    app.conf.task_queues = [*app.amqp.queues.values(), Broadcast(f"news-{app.main}")]
    del app.amqp.queues, app.amqp.router
    news = app.amqp.queues[f"news-{app.main}"]
    with app.connection_for_write() as connection:
        news.exchange(connection.default_channel).declare()
    jobs.stage(app, 1, queue=news.name)
    tally = drain(alias)
    assert (tally.published, tally.dead) == (1, 0)


def test_permission_to_write_revoked_for_a_while(alias, rabbitmq, make_named_app, book, drained):
    """403 is a state of the broker: nothing dies of it, and nothing goes twice."""
    app, jobs = make_named_app(rabbitmq.url), book(alias)
    exchange = {"exchange": app.main, "routing_key": app.main}
    jobs.stage(app, 1)
    drain(alias)  # declares the exchange
    jobs.stage(app, 10)
    jobs.stage(app, 10, **exchange)
    rabbitmq.control("set_permissions", "guest", ".*", "^$", ".*")
    try:
        with draining(alias) as drainer:
            eventually(lambda: "ACCESS_REFUSED" in drainer.trouble, "it is refused")
            trouble = drainer._apps[app.main].backoff
            eventually(lambda: trouble.failures > 2, "it tries again")
            assert StagedJob.objects.using(alias).count() == 20
            # One exchange only: neither do those jobs die, however long it lasts.
            rabbitmq.control("set_permissions", "guest", ".*", "^amq[.]default$", ".*")
            eventually(lambda: StagedJob.objects.using(alias).count() == 10, "the others leave")
            eventually(lambda: "ACCESS_REFUSED" in drainer.trouble, "it is refused")
            rabbitmq.control("set_permissions", "guest", ".*", ".*", ".*")
            drained(alias)
    finally:
        rabbitmq.control("set_permissions", "guest", ".*", ".*", ".*")

    jobs.receive(app)
    jobs.assert_exact()
    assert not DeadJob.objects.using(alias).exists()
