"""Redis goes away, is full, freezes, or its replies are lost; the same drainer goes on."""

from __future__ import annotations

from contextlib import suppress

import pytest
import redis
from kombu import Consumer
from kombu.common import Broadcast

from outbox_app.models import DeadJob, Incident, StagedJob
from tests.faults.tools import drain, draining, eventually, on
from tests.patience import patience

pytestmark = [
    pytest.mark.django_db(transaction=True),
    on("default"),
    pytest.mark.usefixtures("quick"),
]

BATCH = 50
#: A sweep may take one row a shard more.
AT_MOST = BATCH + 128


@pytest.fixture
def server(private_redis):
    """A client of the private server. The server's settings are restored after the test."""
    with redis.Redis.from_url(private_redis.url) as client:
        client.flushall()
        yield client
        client.config_set("maxmemory", "0")
        client.config_set("maxmemory-policy", "noeviction")
        client.config_set("proto-max-bulk-len", "512mb")


def left(alias):
    return StagedJob.objects.using(alias).count()


def assert_is_about(incident, twice):
    """The incident names the ends and the shards of these rows, and no more."""
    assert (incident.first_id, incident.last_id) == (min(twice)[0], max(twice)[0])
    assert incident.shards == sorted({shard for _, shard in twice})


def test_killed_and_restarted_while_a_backlog_waits(
    alias, private_redis, server, make_named_app, book, at, drained
):
    app, jobs = make_named_app(private_redis.url), book(alias)
    jobs.stage(app, 1000)
    at("checked", 5, private_redis.kill)
    with draining(alias, batch_size=BATCH) as drainer:
        eventually(lambda: drainer.trouble, "it notices")
        assert 0 < left(alias) < 1000
        private_redis.start()
        drained(alias)

    jobs.receive(app)
    jobs.assert_complete()
    assert not jobs.twice  # it was killed before the batch was sent, and nothing else is in doubt
    assert not Incident.objects.using(alias).exists()


@pytest.mark.parametrize("mode", ["drop_reply", "cut_on_reply"])
def test_reply_of_a_batch_lost(
    alias, mode, private_redis, server, proxy, make_named_app, book, at, drained
):
    """Nobody sends it again by himself: one extra publish each, and the incident says which.

    Where the connection is cut, some of the batch may not have arrived.
    """
    way, url = proxy(private_redis.url)
    app, jobs = make_named_app(url), book(alias)
    jobs.stage(app, 300)

    connected = []

    def lose():
        connected.append(way.accepted)
        way.mode = mode

    at("checked", 3, lose)
    with draining(alias, batch_size=BATCH):
        # Whoever connects again, the drain or redis-py, finds all well.
        eventually(lambda: connected and way.accepted > connected[0], "it connected again")
        way.mode = "pass"
        drained(alias)

    jobs.receive(app)
    jobs.assert_complete()
    assert set(jobs.twice.values()) == {1}
    incident = Incident.objects.using(alias).get()
    assert incident.kind == Incident.Kind.UNKNOWN
    if mode == "drop_reply":
        assert_is_about(incident, [jobs.jobs[task_id] for task_id in jobs.twice])


@pytest.mark.parametrize("nth", [1, 3])
def test_black_hole(alias, nth, private_redis, server, proxy, make_named_app, book, at, drained):
    """From the first declaration on, or from the second batch on. Nothing that was sent arrives."""
    way, url = proxy(private_redis.url)
    app, jobs = make_named_app(url), book(alias)
    jobs.stage(app, 300)

    def swallow():
        way.mode = "blackhole"

    at("checked", nth, swallow)
    with draining(alias, batch_size=BATCH) as drainer:
        eventually(lambda: drainer.trouble, "it waits no longer")
        assert left(alias) + server.llen(app.main) == 300
        way.mode = "pass"
        drained(alias)

    jobs.receive(app)
    jobs.assert_complete()
    assert not jobs.twice
    # It cannot know that the batch never arrived; of a declaration no incident is needed.
    assert Incident.objects.using(alias).count() == (nth > 1)


@pytest.mark.parametrize("how", ["frozen", "paused", "writes paused"])
def test_stands_still_for_longer_than_the_timeout(
    alias, how, private_redis, server, make_named_app, book, at, drained
):
    app, jobs = make_named_app(private_redis.url), book(alias)
    jobs.stage(app, 300)
    stop = {
        "frozen": private_redis.pause,
        "paused": lambda: server.client_pause(3500),
        "writes paused": lambda: server.client_pause(3500, all=False),
    }[how]
    at("checked", 3, stop)
    with draining(alias, batch_size=BATCH) as drainer:
        eventually(lambda: drainer.trouble, "it waits no longer")
        before = left(alias)
        assert 0 < before < 300
        if how == "frozen":
            failures = drainer._apps[app.main].backoff
            eventually(lambda: failures.failures > 1, "it tried again")
            assert left(alias) == before
            private_redis.resume()
        drained(alias)

    jobs.receive(app)
    jobs.assert_complete()
    assert not DeadJob.objects.using(alias).exists()
    incidents = Incident.objects.using(alias).all()
    assert incidents
    assert {incident.kind for incident in incidents} == {Incident.Kind.UNKNOWN}
    assert set(jobs.twice.values()) <= {1}


def test_out_of_memory(alias, private_redis, server, make_named_app, book, drained):
    """Some of a batch fits. No job is to blame, so none dies; all go when there is room."""
    app, jobs = make_named_app(private_redis.url), book(alias)
    jobs.stage(app, 400, key="of one shard", shadow="x" * 2000)
    server.config_set("maxmemory", server.info("memory")["used_memory"] + 400_000)
    with draining(alias, batch_size=BATCH) as drainer:
        eventually(lambda: "command not allowed when used memory" in drainer.trouble, "full")
        server.config_set("maxmemory", 1)  # no room comes and goes
        trouble = drainer._apps[app.main].backoff
        eventually(lambda: trouble.failures > 3, "it keeps trying")
        assert 0 < left(alias) < 400
        # A full Redis is no accident: only the batch that met it first is in doubt.
        incidents = Incident.objects.using(alias).count()
        eventually(lambda: trouble.failures > 5, "it keeps trying")
        assert Incident.objects.using(alias).count() == incidents
        server.config_set("maxmemory", 0)
        drained(alias)

    jobs.receive(app)
    jobs.assert_complete()
    assert not DeadJob.objects.using(alias).exists()
    assert len(jobs.twice) <= AT_MOST
    assert max(jobs.twice.values(), default=0) <= incidents


def test_one_key_is_of_another_type(
    alias, private_redis, server, make_named_app, book, buried, drained
):
    """Its jobs die with the words of Redis; the rest of the batch is delivered."""
    app, jobs = make_named_app(private_redis.url), book(alias)
    server.set(f"{app.main}-text", "not a list")
    jobs.stage(app, 100)
    refused = jobs.stage(app, 7, queue=f"{app.main}-text")
    jobs.stage(app, 100)
    with draining(alias):
        drained(alias)

    jobs.receive(app)
    jobs.assert_complete(but=refused)
    assert set(buried(alias)) == set(refused)
    assert all("WRONGTYPE" in reason for reason in buried(alias).values())
    assert set(jobs.twice.values()) <= {1}


def test_a_message_is_above_the_limit(
    alias, private_redis, server, make_named_app, book, buried, drained
):
    """Redis closes the connection, often before its answer is read. The job dies alone."""
    server.config_set("proto-max-bulk-len", "1mb")
    app, jobs = make_named_app(private_redis.url), book(alias)
    jobs.stage(app, 20)
    [large] = jobs.stage(app, 1, shadow="x" * 2_000_000)
    jobs.stage(app, 20)
    with draining(alias):
        drained(alias)

    jobs.receive(app)
    jobs.assert_complete(but=[large])
    [(job, reason)] = buried(alias).items()
    assert job == large
    assert "invalid bulk length" in reason or "limit (proto-max-bulk-len of Redis)" in reason
    assert not jobs.twice


def test_evicting_redis_is_refused(
    alias, private_redis, server, make_named_app, start_drainer, book
):
    server.config_set("maxmemory-policy", "allkeys-lru")
    app, jobs = make_named_app(private_redis.url), book(alias)
    jobs.stage(app, 1)

    drainer = start_drainer(alias, app, "--once")

    assert drainer.wait() == 3
    assert "maxmemory-policy is 'allkeys-lru'" in drainer.output
    assert "Set maxmemory-policy to noeviction" in drainer.output
    assert left(alias) == 1


def test_evicting_what_has_a_ttl_is_warned_of(
    alias, private_redis, server, make_named_app, book, drained, caplog
):
    server.config_set("maxmemory-policy", "volatile-lru")
    app, jobs = make_named_app(private_redis.url), book(alias)
    jobs.stage(app, 1)
    with draining(alias):
        drained(alias)
    jobs.receive(app)
    jobs.assert_exact()
    assert "policy=volatile-lru" in caplog.text


def test_info_forbidden(alias, private_redis, server, make_named_app, book, drained, caplog):
    server.acl_setuser(
        "silent", enabled=True, passwords="+secret", keys="*", channels="*",
        categories=["+@all"], commands=["-info"],
    )  # fmt: skip
    url = private_redis.url.replace("//", "//silent:secret@")
    app, jobs = make_named_app(url), book(alias)
    jobs.stage(app, 10)
    with draining(alias):
        drained(alias)
    jobs.receive(app)
    jobs.assert_exact()
    assert "Redis does not tell its eviction policy" in caplog.text
    assert "secret" not in caplog.text


def test_broadcast(alias, private_redis, server, make_named_app, book):
    """Nobody may listen, which is no error; a worker that listens gets it."""
    app, jobs = make_named_app(private_redis.url), book(alias)
    news = f"news-{app.main}"
    app.conf.task_queues = [*app.amqp.queues.values(), Broadcast(news)]
    del app.amqp.queues, app.amqp.router

    jobs.stage(app, 1, queue=news)
    tally = drain(alias)

    assert (tally.published, tally.dead) == (1, 0)
    assert not server.keys("*")
    with app.connection_for_read() as connection:
        got = []
        queue = app.amqp.queues[news]
        Consumer(connection.channel(), [queue], no_ack=True, on_message=got.append).consume()

        def it_listens():
            with suppress(TimeoutError):
                connection.drain_events(timeout=0.1)
            return sum(int(each["sub"]) + int(each["psub"]) for each in server.client_list()) == 1

        eventually(it_listens)
        [task_id] = jobs.stage(app, 1, queue=news)
        drain(alias)
        while not got:
            connection.drain_events(timeout=patience(10))
    assert [message.headers["id"] for message in got] == [task_id]
