"""Any other kombu transport: plain publishes, one by one, without a word about the broker."""

from __future__ import annotations

import json

import pytest
from kombu import Exchange, Producer, Queue

import example_project.celery  # noqa: F401  # makes embedded:// a broker URL
from outbox_app.models import StagedJob
from tests.faults.tools import drain, on

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
