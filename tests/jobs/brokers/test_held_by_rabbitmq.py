"""Exchanges at which RabbitMQ routes a message later, or in a way of their own.

RabbitMQ's delayed-message plugin answers for a message that it holds "no route". The exchange type
of ``outbox_delayed`` stands in for it; the other types are RabbitMQ's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from uuid import uuid4

import pytest
from kombu import Exchange, Queue

from outbox_app.jobs import immediate
from outbox_app.models import DeadJob, StagedJob
from tests.faults.tools import drain, eventually, on
from tests.servers import RabbitMQ

pytestmark = [pytest.mark.django_db(transaction=True), pytest.mark.usefixtures("quick")]

DELAYED = "x-delayed-message"
PLUGINS = {
    "x-consistent-hash": "rabbitmq_consistent_hash_exchange",
    "x-modulus-hash": "rabbitmq_sharding",
    "x-random": "rabbitmq_random_exchange",
    "x-recent-history": "rabbitmq_recent_history_exchange",
}


@pytest.fixture(scope="module")
def server() -> Iterator[RabbitMQ]:
    with RabbitMQ(plugins=["outbox_delayed", *PLUGINS.values()]) as started:
        yield started


@pytest.fixture
def app(server, make_named_app):
    return make_named_app(server.url)


def queue_of(app, type_, *, key="1"):
    """A queue of the app's name that a new exchange of a type feeds."""
    arguments = {"x-delayed-type": "direct"} if type_ == DELAYED else {}
    exchange = Exchange(f"{type_}-{uuid4().hex}", type=type_, arguments=arguments)
    return Queue(app.main, exchange, routing_key=key)


def configure(app, queue, *, key="1"):
    """Send the app's jobs through a queue's exchange, with a routing key."""
    app.conf.task_queues = [queue]
    app.conf.task_routes = {"note": {"queue": app.main, "routing_key": key}}
    return app


def declare(app, entity):
    with app.connection_for_write() as connection:
        entity(connection.default_channel).declare()


def held(milliseconds=300):
    return {"headers": {"x-delay": milliseconds}}


def receive(app, jobs, count, *, but=()):
    eventually(lambda: len(jobs.receive(app)) >= count, "RabbitMQ delivers")
    jobs.assert_exact(but=but)


def test_held_jobs_are_not_dead(alias, app, book):
    """They were, and were executed all the same. Alone, and among jobs that are like them."""
    configure(app, queue_of(app, DELAYED))
    jobs = book(alias)
    for count in (1, 20):
        jobs.stage(app, count, **held())
        jobs.stage(app, count)

    tally = drain(alias)

    assert (tally.published, tally.dead) == (42, 0)
    receive(app, jobs, 42)


@on("default")
def test_immediate_delivery(alias, app, book, settings):
    patient = {"IMMEDIATE_TIMEOUT": 20, "IMMEDIATE_HOLD": 600}
    settings.OUTBOX = {**settings.OUTBOX, **patient, "IMMEDIATE": True}
    configure(app, queue_of(app, DELAYED))
    jobs = book(alias)
    try:
        jobs.stage(app, 1, **held())
    finally:
        immediate.broker_of(app.main).close()
    assert not StagedJob.objects.using(alias).exists()
    assert not DeadJob.objects.using(alias).exists()
    receive(app, jobs, 1)


@on("default")
def test_the_queue_of_a_call(alias, app, book):
    """No configuration names its exchange: the job brings it along."""
    jobs = book(alias)
    jobs.stage(app, 3, queue=queue_of(app, DELAYED), **held())
    assert drain(alias).published == 3
    receive(app, jobs, 3)


@on("default")
@pytest.mark.parametrize("headers", [{}, *({"x-delay": value} for value in (0, -5, True, 2**32))])
def test_what_is_not_held_needs_a_queue(alias, headers, app, book):
    configure(app, queue_of(app, DELAYED), key="2")
    jobs = book(alias)
    ids = jobs.stage(app, 2, headers=headers)
    assert drain(alias).dead == 2
    assert all("NO_ROUTE" in job.reason for job in DeadJob.objects.using(alias))
    jobs.receive(app)
    jobs.assert_exact(but=ids)


@on("default")
def test_an_exchange_of_an_unknown_type(alias, app, book):
    """Its held jobs are dead before they are sent, so that they are not executed as well."""
    queue, jobs = queue_of(app, DELAYED), book(alias)
    declare(app, queue)
    route = {"exchange": queue.exchange.name, "routing_key": "1"}
    [unsent] = jobs.stage(app, 1, **route, **held(1))
    # RabbitMQ's own exchanges hold nothing.
    [unrouted] = jobs.stage(app, 1, exchange="amq.direct", routing_key="nowhere", **held(1))
    jobs.stage(app, 2, **route)

    assert drain(alias).dead == 2

    reasons = dict(DeadJob.objects.using(alias).values_list("task_id", "reason"))
    assert "Declare the exchange with its type in task_queues" in reasons[unsent]
    assert "NO_ROUTE" in reasons[unrouted]
    receive(app, jobs, 2, but=[unsent, unrouted])


@on("default")
@pytest.mark.parametrize("delay", ["soon", "1.5", [1], "9" * 5000])
def test_a_delay_that_the_plugin_cannot_read(alias, delay, app, book):
    """RabbitMQ would close the connection, as if the fault were its own: all jobs would wait."""
    configure(app, queue_of(app, DELAYED))
    jobs = book(alias)
    jobs.stage(app, 2)
    [refused] = jobs.stage(app, 1, **held(delay))
    jobs.stage(app, 2, **held("1"))
    assert drain(alias).dead == 1
    reason = DeadJob.objects.using(alias).get().reason
    assert "a number of milliseconds" in reason
    receive(app, jobs, 4, but=[refused])


@on("default")
@pytest.mark.parametrize("type_", PLUGINS)
def test_other_types_route_at_once(alias, type_, app, book):
    """Their answer is true, and a header x-delay means nothing to them."""
    jobs, exchange = book(alias), queue_of(app, type_).exchange
    configure(app, Queue(app.main, exchange, routing_key="1"))
    jobs.stage(app, 3, **held())
    assert drain(alias).published == 3
    receive(app, jobs, 3)

    declare(app, empty := queue_of(app, type_).exchange)
    unrouted = jobs.stage(app, 2, exchange=empty.name, routing_key="1")
    assert drain(alias).dead == 2
    jobs.assert_exact(but=unrouted)


@on("default")
def test_an_alternate_exchange_is_a_route(alias, app, book):
    jobs = book(alias)
    alternate = Exchange(f"alternate-{uuid4().hex}", type="fanout")
    declare(app, Queue(app.main, alternate))
    exchange = Exchange(uuid4().hex, arguments={"alternate-exchange": alternate.name})
    declare(app, exchange)
    jobs.stage(app, 2, exchange=exchange.name, routing_key="nowhere")
    assert drain(alias).published == 2
    receive(app, jobs, 2)
