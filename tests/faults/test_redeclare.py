"""Queues that exist with other arguments (406): the drain publishes anyway, on few connections."""

from __future__ import annotations

import pytest
from kombu import Connection, Queue

from .tools import drain, on

pytestmark = pytest.mark.django_db(transaction=True)


@on("postgres")
def test_two_of_them_in_turns(alias, rabbitmq_url, proxy, make_named_app, book, quick):
    """Each refusal costs the channel; what is known by then must not be forgotten with it."""
    link, url = proxy(rabbitmq_url)
    app, jobs = make_named_app(url), book(alias)
    names = [f"{app.main}-{i}" for i in range(2)]
    app.conf.task_queues = [Queue(name, routing_key=name) for name in names]
    with Connection(rabbitmq_url) as connection:
        for name in names:
            arguments = {"x-max-length": 1000}
            Queue(name, queue_arguments=arguments)(connection.default_channel).queue_declare()
    for _ in range(20):
        for name in names:
            jobs.stage(app, 1, queue=name)

    drain(alias)

    assert link.accepted <= 4
    with Connection(rabbitmq_url) as connection:
        for name in names:
            queue = Queue(name)(connection.default_channel)
            for _ in range(20):
                jobs.sent.append(queue.get(no_ack=True).headers["id"])
            queue.delete()
    jobs.assert_exact()
