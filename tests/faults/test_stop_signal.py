"""SIGTERM: the drainer finishes its batch, releases its shards, and exits with code 0.

This holds for any outage at that moment. ``wait`` gives the grace time that supervisors give.
"""

from __future__ import annotations

import signal
import threading

import pytest
from django.db import connections

from outbox_app.models import Process, StagedJob
from tests.patience import patience

from .tools import PATIENT, Book, assert_handed_back, drain, eventually, on

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@on("postgres", "mariadb", "default")
def test_under_load(alias, number, redis_url, make_named_app, start_drainer, book):
    app, jobs = make_named_app(redis_url), book(alias)
    staged, ended = {}, threading.Event()

    def write():
        while not ended.wait(0.01):
            written = Book(using=alias)
            written.stage(app, 20)
            staged.update(written.jobs)
        connections[alias].close()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        drainer = start_drainer(alias, app)
        eventually(lambda: len(jobs.receive(app)) > 500, "under load")
        drainer.signal(number)
        assert drainer.wait() == 0
    finally:
        ended.set()
        writer.join(patience())

    assert "Drainer stopped published=" in drainer.output
    assert_handed_back(alias)
    drain(alias)
    jobs.jobs = staged
    jobs.receive(app)
    jobs.assert_exact()


@on("postgres")
def test_twice(alias, redis_url, make_named_app, start_drainer):
    drainer = start_drainer(alias, make_named_app(redis_url))
    eventually(Process.objects.using(alias).exists, "it runs")
    drainer.signal(signal.SIGTERM)
    drainer.signal(signal.SIGTERM)
    assert drainer.wait() == 0
    assert_handed_back(alias)


@on("postgres")
def test_several_processes(alias, redis_url, make_named_app, start_drainer):
    """The parent passes it on; where the parent is killed, nobody could, so they end as well."""
    drainers = Process.objects.using(alias)
    parent = start_drainer(alias, make_named_app(redis_url), "--processes", "2")
    eventually(lambda: drainers.count() == 2, "both run")
    assert parent.stop() == 0
    assert_handed_back(alias)

    parent = start_drainer(alias, make_named_app(redis_url), "--processes", "2")
    eventually(lambda: drainers.count() == 2, "both run")
    parent.signal(signal.SIGKILL)
    assert parent.wait() == -signal.SIGKILL
    eventually(lambda: not drainers.exists(), "the orphans ended")
    assert_handed_back(alias)


@pytest.mark.parametrize("how", ["refuse", "blackhole"])
@on("postgres")
def test_while_the_broker_is_away(
    alias, how, redis_url, rabbitmq_url, proxy, make_named_app, start_drainer, book, quick
):
    """Both brokers, each of an app of its own."""
    jobs = book(alias)
    proxies, urls = zip(*(proxy(url) for url in (redis_url, rabbitmq_url)), strict=True)
    apps = [make_named_app(url) for url in urls]
    drainer = start_drainer(alias, *apps)
    for app in apps:
        jobs.stage(app, 10)
    eventually(lambda: not StagedJob.objects.using(alias).exists(), "it works")
    for broker in proxies:
        broker.mode = how
        if how == "refuse":
            broker.cut()
    for app in apps:
        jobs.stage(app, 10)
    eventually(lambda: drainer.output.count('Unavailable what="broker') == 2, "both are in trouble")

    assert drainer.stop() == 0
    assert_handed_back(alias)
    for broker in proxies:
        broker.mode = "pass"
        broker.cut()
    drain(alias)
    for app in apps:
        jobs.receive(app)
    jobs.assert_complete()


@on("postgres")
def test_while_the_broker_is_slow(
    alias, rabbitmq_url, proxy, make_named_app, start_drainer, book, quick
):
    """One confirm after the other, a batch would take minutes: what is not sent yet is left."""
    slow, url = proxy(rabbitmq_url)
    app, jobs = make_named_app(url), book(alias)
    jobs.stage(app, 500, key="one after the other")
    slow.mode, slow.delay = "delay", 0.15
    drainer = start_drainer(alias, app, outbox=PATIENT)
    eventually(lambda: len(jobs.receive(app, url=rabbitmq_url)) > 3, "in the middle of a batch")

    assert drainer.stop() == 0
    assert_handed_back(alias)
    slow.mode = "pass"
    left = StagedJob.objects.using(alias).count()
    assert left > 100
    drain(alias)
    jobs.receive(app)
    jobs.assert_exact()
