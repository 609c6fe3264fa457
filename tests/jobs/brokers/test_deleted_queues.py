"""A queue is deleted after a connected drainer has declared it: the next job declares it again."""

from __future__ import annotations

import pytest
from django.db import transaction

from outbox_app.signals import jobs_published
from tests.faults.tools import draining, on

pytestmark = [
    pytest.mark.django_db(transaction=True),
    on("default"),
    pytest.mark.usefixtures("quick"),
]


@pytest.fixture(params=["redis", "rabbitmq"])
def app(request, make_named_app):
    return make_named_app(request.getfixturevalue(f"{request.param}_url"))


def delete_queue(app):
    """As ``auto_delete``, ``expires``, FLUSHDB or a person does it."""
    with app.connection_for_write() as connection:
        channel = connection.default_channel
        if connection.transport.driver_type == "redis":
            channel.client.flushdb()
        else:
            channel.queue_delete(app.main)
            channel.exchange_delete(app.main)


@pytest.mark.parametrize("count", [1, 20])
@pytest.mark.parametrize("exchange", ["", "its own"])
def test_it_is_declared_anew(alias, app, count, exchange, book, drained):
    jobs = book(alias)
    options = {"exchange": app.main, "routing_key": app.main} if exchange else {}
    with draining(alias) as drainer:
        jobs.stage(app, 2, queue=app.main, **options)
        drained(alias)
        jobs.receive(app)
        delete_queue(app)
        jobs.stage(app, count, queue=app.main, **options)
        drained(alias)
        assert drainer.tally.dead == 0

    jobs.receive(app)
    jobs.assert_complete()
    assert not jobs.twice


def test_the_later_jobs_of_its_key_wait(alias, app, book, drained):
    jobs, other, order = book(alias), f"{app.main}-other", []

    def note(jobs, **_):
        order.extend(row.task_id for row in jobs)

    with draining(alias):
        for queue in (app.main, other):
            jobs.stage(app, 2, queue=queue)
        drained(alias)
        for queue in (app.main, other):
            jobs.receive(app, queue)
        delete_queue(app)
        jobs_published.connect(note)
        with transaction.atomic(using=alias):
            first = jobs.stage(app, 1, queue=app.main, key="k")
            jobs.stage(app, 20, queue=other)
            second = jobs.stage(app, 1, queue=other, key="k")
        drained(alias)
    jobs_published.disconnect(note)

    assert [id for id in order if id in first + second] == first + second
    for queue in (app.main, other):
        jobs.receive(app, queue)
    jobs.assert_complete()


def test_a_route_that_no_declaration_makes_is_the_jobs_fault(alias, app, book, buried, drained):
    jobs = book(alias)
    wrong = {"queue": app.main, "exchange": "amq.direct", "routing_key": "nowhere"}
    with draining(alias):
        jobs.stage(app, 2, queue=app.main)
        drained(alias)
        bad = jobs.stage(app, 2, **wrong)
        jobs.stage(app, 20)
        drained(alias)

    assert set(buried(alias)) == set(bad)
    jobs.receive(app)
    jobs.assert_exact(but=bad)
