"""Several Celery apps, each with its own broker: if one is down, jobs of the others leave."""

from __future__ import annotations

import pytest
from celery import Celery

from outbox_app.jobs.staging import sending
from outbox_app.models import DeadJob, StagedJob
from tests.faults.tools import drain, draining, eventually, on
from tests.servers import Redis

pytestmark = [
    pytest.mark.django_db(transaction=True),
    on("default"),
    pytest.mark.usefixtures("quick"),
]


@pytest.fixture(scope="module")
def other_redis():
    with Redis() as server:
        yield server


def left(alias, app):
    return StagedJob.objects.using(alias).filter(app=app.main).count()


def test_one_of_two_brokers_is_down(
    alias, private_redis, other_redis, make_named_app, book, drained
):
    down, up = make_named_app(private_redis.url), make_named_app(other_redis.url)
    jobs = book(alias)
    private_redis.kill()
    with draining(alias, batch_size=50) as drainer:
        for _ in range(3):
            jobs.stage(down, 200)  # as if nothing had happened (P11)
            jobs.stage(up, 200)
            eventually(lambda: not left(alias, up), "the other's jobs flow")
        assert down.main in drainer.trouble
        assert up.main not in drainer.trouble
        assert left(alias, down) == 600
        private_redis.start()
        drained(alias)
        assert not drainer.trouble

    assert len(jobs.receive(up)) == 600
    jobs.receive(down)
    jobs.assert_exact()  # nothing was ever sent to a closed port


def test_app_that_the_drainer_does_not_load(alias, other_redis, make_named_app, book):
    app, elsewhere = make_named_app(other_redis.url), make_named_app(other_redis.url)
    jobs = book(alias)
    jobs.stage(app, 10)
    lost = jobs.stage(elsewhere, 10)
    StagedJob.objects.using(alias).filter(app=elsewhere.main).update(app="not loaded")

    tally = drain(alias)

    assert (tally.published, tally.dead) == (10, 10)
    jobs.receive(app)
    jobs.assert_exact(but=lost)
    dead = DeadJob.objects.using(alias).all()
    assert {job.task_id for job in dead} == set(lost)
    assert all("No Celery app named 'not loaded' is loaded" in job.reason for job in dead)
    assert all("Import its module" in job.reason for job in dead)


def test_a_plain_app_of_the_same_name_takes_nothing(alias, make_app, monkeypatch):
    app = make_app()
    plain = Celery(app.main, broker="memory://", set_as_current=False)
    for found in ([app, plain], [plain, app]):
        monkeypatch.setattr(sending, "active_apps", lambda found=found: found)
        assert sending.celery_app(app.main) is app
    plain.close()
