"""RabbitMQ goes away, freezes, or its confirms are lost; the same drainer goes on.

In these tests the drainer waits for each confirm, as it does if kombu has no batches.
"""

from __future__ import annotations

import pytest
from kombu import Producer

from outbox_app.models import DeadJob, Incident, StagedJob
from tests.faults.tools import draining, eventually, on

pytestmark = [
    pytest.mark.django_db(transaction=True),
    on("default"),
    pytest.mark.usefixtures("quick"),
]


@pytest.fixture(autouse=True)
def no_batches(monkeypatch):
    monkeypatch.delattr(Producer, "batch")


def left(alias):
    return StagedJob.objects.using(alias).count()


def test_killed_and_restarted_in_the_middle_of_a_batch(
    alias, private_rabbitmq, make_named_app, book, at, drained
):
    app, jobs = make_named_app(private_rabbitmq.url), book(alias)
    jobs.stage(app, 200)
    at("checked", 20, private_rabbitmq.kill)
    with draining(alias, batch_size=50) as drainer:
        eventually(lambda: drainer.trouble, "it notices")
        # Staging goes on as if nothing had happened (P11).
        jobs.stage(app, 200)
        assert 200 < left(alias) < 400
        private_rabbitmq.start()
        drained(alias)

    jobs.receive(app)
    jobs.assert_complete()
    assert len(jobs.twice) <= 1  # it waits for each confirm
    incidents = Incident.objects.using(alias).all()
    assert all(incident.first_id == incident.last_id for incident in incidents)


@pytest.mark.parametrize("mode", ["drop_reply", "cut_on_reply"])
def test_confirm_lost(alias, mode, rabbitmq, proxy, make_named_app, book, at, drained):
    """The one message whose confirm was lost goes again, and the incident is about it alone."""
    way, url = proxy(rabbitmq.url)
    app, jobs = make_named_app(url), book(alias)
    jobs.stage(app, 30)

    def lose():
        way.mode = mode

    at("checked", 10, lose)
    with draining(alias) as drainer:
        eventually(lambda: drainer.trouble, "it waits no longer")
        way.mode = "pass"
        drained(alias)

    jobs.receive(app, url=rabbitmq.url)
    jobs.assert_complete()
    [(task_id, extra)] = jobs.twice.items()
    incident = Incident.objects.using(alias).get()
    assert extra == 1
    assert incident.kind == Incident.Kind.UNKNOWN
    assert (incident.first_id, incident.shards) == (jobs.jobs[task_id][0], [jobs.jobs[task_id][1]])
    assert incident.last_id == incident.first_id


def test_late_confirm_is_not_credited_to_another_message(
    alias, rabbitmq, proxy, make_named_app, book, at, drained
):
    """Had the connection been kept, the late confirm would be that of a message never sent."""
    way, url = proxy(rabbitmq.url)
    app, jobs = make_named_app(url), book(alias)
    jobs.stage(app, 30)
    way.delay = 0.7  # there and back again: more than the timeout

    def delay():
        way.mode = "delay"

    at("checked", 10, delay)
    with draining(alias) as drainer:
        eventually(lambda: way.accepted, "it connected")
        eventually(lambda: drainer.trouble, "it waits no longer")
        settled = left(alias)
        eventually(lambda: way.accepted > 1, "the connection was dropped")
        assert left(alias) == settled
        # Confirms of what was sent before arrive now; the new connection swallows.
        way.mode = "blackhole"
        failures = drainer._apps[app.main].backoff
        eventually(lambda: failures.failures > 2, "it tried again")
        assert left(alias) == settled
        way.mode = "pass"
        drained(alias)

    jobs.receive(app, url=rabbitmq.url)
    jobs.assert_complete()
    assert len(jobs.twice) <= 1


@pytest.mark.parametrize("nth", [1, 10])
def test_black_hole(alias, nth, rabbitmq, proxy, make_named_app, book, at, drained):
    way, url = proxy(rabbitmq.url)
    app, jobs = make_named_app(url), book(alias)
    jobs.stage(app, 30)

    def swallow():
        way.mode = "blackhole"

    at("checked", nth, swallow)
    with draining(alias) as drainer:
        eventually(lambda: drainer.trouble, "it waits no longer")
        held = left(alias)
        arrived = len(jobs.receive(app, url=rabbitmq.url))
        assert held + arrived == 30
        way.mode = "pass"
        drained(alias)

    jobs.receive(app, url=rabbitmq.url)
    jobs.assert_complete()
    assert not jobs.twice


def test_memory_alarm(alias, rabbitmq, make_named_app, book, at, drained):
    """No message is read while the alarm is on, and one that waits in a socket is read later."""
    app, jobs = make_named_app(rabbitmq.url), book(alias)
    jobs.stage(app, 30)

    def alarm():
        rabbitmq.control("set_vm_memory_high_watermark", "0.00001")

    at("checked", 10, alarm)
    try:
        with draining(alias) as drainer:
            eventually(lambda: drainer.trouble, "it waits no longer")
            failures = drainer._apps[app.main].backoff
            eventually(lambda: failures.failures > 2, "it tried again")
            assert 0 < left(alias) < 30
            rabbitmq.control("set_vm_memory_high_watermark", "0.4")
            drained(alias)
    finally:
        rabbitmq.control("set_vm_memory_high_watermark", "0.4")

    jobs.receive(app)
    jobs.assert_complete()
    assert not DeadJob.objects.using(alias).exists()
    assert sum(jobs.twice.values()) <= 1  # however often it tried


def test_connection_that_was_closed_meanwhile(
    alias, rabbitmq, proxy, make_named_app, book, drained
):
    """A load balancer cuts connections that are idle: nothing was sent, so nothing is unknown."""
    way, url = proxy(rabbitmq.url)
    app, jobs = make_named_app(url), book(alias)
    with draining(alias) as drainer:
        jobs.stage(app, 1)
        drained(alias)
        way.cut()
        jobs.stage(app, 1)
        drained(alias)
        assert not drainer.trouble

    jobs.receive(app, url=rabbitmq.url)
    jobs.assert_exact()
