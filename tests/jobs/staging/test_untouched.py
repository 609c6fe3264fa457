"""Staging contacts neither the broker nor the result backend, so both may be down."""

from __future__ import annotations

import gc
import socket
from collections.abc import Iterator

import pytest
from celery import chain, chord, group
from django.db import transaction
from kombu import Exchange, Queue

from outbox_app import stage, stage_many
from outbox_app.models import StagedJob
from tests.jobs.staging import tasks
from tests.servers import Proxy, Redis, free_port

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.parametrize("alias", ["default"]),
    pytest.mark.timeout(30),  # a black hole is waited for without end
]


class BlackHole:
    """A port that takes connections and never answers."""

    def __init__(self) -> None:
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.socket.setblocking(False)
        self.port = self.socket.getsockname()[1]

    def was_contacted(self) -> bool:
        try:
            self.socket.accept()[0].close()
        except BlockingIOError:
            return False
        return True


@pytest.fixture
def black_hole() -> Iterator[BlackHole]:
    hole = BlackHole()
    with hole.socket:
        yield hole


URLS = {
    "redis": ("redis://127.0.0.1:{}/0", "redis://127.0.0.1:{}/1"),
    "amqp": ("amqp://guest:guest@127.0.0.1:{}//", "redis://127.0.0.1:{}/1"),
    "amqp and rpc": ("amqp://guest:guest@127.0.0.1:{}//", "rpc://"),
    "redis and rpc": ("redis://127.0.0.1:{}/0", "rpc://"),
}
each_url = pytest.mark.parametrize("urls", URLS.values(), ids=URLS)
EVENTS = {"task_send_sent_event": True}
DELAYS = {
    "task_queues": [
        Queue("q", Exchange("t", "topic"), "q", queue_arguments={"x-queue-type": "quorum"})
    ],
    "task_default_queue": "q",
}


def stage_every_form(add):
    add.delay(1, 1)
    add.apply_async((1, 1), countdown=1000, link=add.s(2), link_error=add.si(3, 3))
    add.app.send_task("elsewhere", (1,))
    chain(add.s(1, 1), add.s(2), add.s(3)).delay()
    chain(add.s(1, 1), group(add.s(2), add.s(3))).delay()
    group(add.s(i, i) for i in range(3)).delay()
    group(chain(add.s(1, 1), add.s(2)), group(add.s(1, 1), add.s(2, 2))).delay()
    add.chunks([(1, 1), (2, 2)], 1).group().delay()
    add.starmap([(1, 1)]).delay()
    add.delay_on_commit(1, 1)
    stage(add, (1, 1))
    stage_many(add.s(i, i) for i in range(3))
    with add.app.producer_or_acquire() as producer:
        add.apply_async((1, 1), producer=producer)


FORMS = 20  # jobs of that function


@each_url
@pytest.mark.parametrize("conf", [{}, EVENTS, DELAYS], ids=["", "events", "quorum queues"])
def test_a_black_hole_is_not_contacted(urls, conf, alias, make_app, black_hole):
    broker_url, backend_url = (url.format(black_hole.port) for url in urls)
    app = make_app(broker_url, result_backend=backend_url, **conf)
    add = app.task(name="add", shared=False)(tasks.add)

    with transaction.atomic(using=alias):
        stage_every_form(add)
    gc.collect()  # results that are dropped have nothing to cancel

    assert StagedJob.objects.using(alias).count() == FORMS
    assert not black_hole.was_contacted()


@each_url
def test_a_closed_port_is_as_good(urls, alias, make_app):
    broker_url, backend_url = (url.format(free_port()) for url in urls)
    app = make_app(broker_url, result_backend=backend_url)
    add = app.task(name="add", shared=False)(tasks.add)

    with transaction.atomic(using=alias):
        stage_every_form(add)

    assert StagedJob.objects.using(alias).count() == FORMS


@each_url
def test_nor_is_it_by_what_is_staged_outside_a_transaction(
    urls, alias, make_app, black_hole, settings
):
    settings.OUTBOX = {**settings.OUTBOX, "OUTSIDE": "stage"}
    broker_url, backend_url = (url.format(black_hole.port) for url in urls)
    app = make_app(broker_url, result_backend=backend_url)

    stage_every_form(app.task(name="add", shared=False)(tasks.add))

    assert StagedJob.objects.using(alias).count() == FORMS
    assert not black_hole.was_contacted()


def test_what_was_up_and_is_gone_is_not_missed(alias, make_app):
    """Connections that are open already are not used, either."""
    with Redis() as redis, Proxy("127.0.0.1", redis.port) as proxy:
        url = f"redis://127.0.0.1:{proxy.port}/0"
        app = make_app(url, result_backend=url)
        add = app.task(name="add", shared=False)(tasks.add)
        group(add.s(1, 1), add.s(2, 2)).delay()
        app.backend.client.ping()
        proxy.mode = "blackhole"

        with transaction.atomic(using=alias):
            stage_every_form(add)
            results = [add.delay(1, 1), group(add.s(1, 1), add.s(2, 2)).delay()]
        del results
        assert StagedJob.objects.using(alias).count() == FORMS + 3

        proxy.cut()
        app.backend.result_consumer.subscribed_to.clear()
        app.pool.force_close_all()


@pytest.mark.parametrize("is_black_hole", [True, False], ids=["black hole", "closed port"])
def test_a_chord_without_its_result_backend_fails_in_the_callers_line(
    is_black_hole, alias, make_app, black_hole
):
    port = black_hole.port if is_black_hole else free_port()
    app = make_app(
        f"redis://127.0.0.1:{black_hole.port}/0",
        result_backend=f"redis://127.0.0.1:{port}/1",
        redis_socket_timeout=0.2,
        redis_socket_connect_timeout=0.2,
        result_backend_transport_options={"retry_policy": {"max_retries": 1, "interval_start": 0}},
    )
    add = app.task(name="add", shared=False)(tasks.add)
    with transaction.atomic(using=alias):
        add.delay("before", 0)
        for canvas in (
            chord([add.s(1, 1), add.s(2, 2)], add.s(3)),
            chain(group(add.s(1, 1), add.s(2, 2)), add.s(3)),
            group(add.s(1, 1), chord([add.s(1, 1), add.s(2, 2)], add.s(3))),
        ):
            with pytest.raises(Exception, match=r"refused|[Tt]imeout|timed out"):
                canvas.delay()
        add.delay("after", 0)

    bodies = [bytes(job.body) for job in StagedJob.objects.using(alias).order_by("id")]
    assert len(bodies) == 2
    assert b"before" in bodies[0]
    assert b"after" in bodies[1]
