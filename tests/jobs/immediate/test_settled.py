"""Jobs that were not published, or perhaps, are left to the drain, with an incident if in doubt."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from datetime import timedelta
from types import SimpleNamespace

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.db import connections, transaction
from kombu import Exchange, Queue

from outbox_app.database.clock import DatabaseNow
from outbox_app.failpoints import set_failpoint
from outbox_app.jobs import immediate
from outbox_app.jobs.drain import outcome
from outbox_app.jobs.drain.drain import Drain
from outbox_app.jobs.drain.outcome import PublishResult
from outbox_app.jobs.drain.publisher import Publisher
from outbox_app.models import Incident, StagedJob, Statistic
from outbox_app.monitoring.series import series
from outbox_app.process import backoff, counters
from tests.entities.test_interrupted_anywhere import SoftLimit, own_state, raising_at
from tests.faults.tools import drain
from tests.jobs.staging.test_threads import at_line

pytestmark = pytest.mark.django_db(transaction=True)
AWAY = "redis://127.0.0.1:1/0"


@pytest.fixture
def at():
    """``at(failpoint, action)``: call it at the failpoint, for the time of the test."""
    names = []

    def put(name, action):
        names.append(name)
        set_failpoint(name, action)

    yield put
    for name in names:
        set_failpoint(name, None)


@pytest.fixture
def run_out(alias):
    """``run_out()``: end the time of every hold."""
    past = DatabaseNow() - timedelta(seconds=1)
    rows = StagedJob.objects.using(alias).filter(is_immediate=True)
    return lambda: rows.all().update(available_at=past)


def _call(app, alias, *numbers):
    with transaction.atomic(using=alias):
        for i in numbers:
            app.tasks["note"].delay("", i)


def test_a_broker_that_is_away_is_waited_for_by_one_commit_and_named_once(
    alias, app, redis_url, states, book, caplog, monkeypatch, on
):
    app.conf.broker_url = AWAY
    jobs = book(alias)
    opened = []
    open_ = Publisher.open
    monkeypatch.setattr(Publisher, "open", lambda *args: (opened.append(1), open_(*args)))
    on()
    monkeypatch.setattr(backoff, "MAX_BACKOFF", 600)
    with caplog.at_level(logging.INFO, logger="outbox_app.immediate"):
        _call(app, alias, 1, 2)
        assert states() == ["ready", "ready"]
        circuit = immediate.broker_of(app.main).circuit
        circuit._until += 600  # a long pause
        _call(app, alias, 3)
        assert len(opened) == 1
        circuit._until = 0
        _call(app, alias, 4)
        assert len(opened) == 2
        assert states() == ["ready"] * 4
        app.conf.broker_url = redis_url
        immediate.broker_of(app.main)._idle.clear()
        circuit._until = 0
        _call(app, alias, 5)
    assert states() == ["ready"] * 4
    assert [record.msg.split()[0] for record in caplog.records] == ["Unavailable", "Available"]
    jobs.note()
    assert drain(alias).published == 4
    jobs.receive(app)
    assert not jobs.twice
    assert not Incident.objects.using(alias).exists()


def test_while_a_broker_is_away_a_commit_costs_what_it_costs_without(
    alias, app, states, django_assert_num_queries, on
):
    """P11."""
    on(WAKE=False)
    immediate.broker_of(app.main).circuit.failed(OSError("away"))
    immediate.broker_of(app.main).circuit._until += 600
    with django_assert_num_queries(3, connection=connections[alias]):  # BEGIN, INSERT, COMMIT
        _call(app, alias, 1)
    assert states() == ["ready"]


def test_while_one_commit_tries_the_broker_again_no_other_does(
    alias, app, redis_url, states, monkeypatch
):
    broker = immediate.broker_of(app.main)
    broker.circuit.failed(OSError("away"))
    broker.circuit._until = 0
    publish = Publisher.publish

    def publish_beside_another(*args, **options):
        monkeypatch.undo()
        _call(app, alias, 1)
        assert states() == ["held", "ready"]
        return publish(*args, **options)

    monkeypatch.setattr(Publisher, "publish", publish_beside_another)
    _call(app, alias, 2)
    assert states() == ["ready"]
    assert not broker.circuit.failures


@pytest.fixture
def slow(monkeypatch):
    """``slow("open", 25)``: make this step of a publisher take so many seconds."""

    def make(step, seconds):
        clock = SimpleNamespace(now=0.0, monotonic=lambda: clock.now)
        plain = getattr(Publisher, step)

        def slowly(*args, **options):
            clock.now += seconds
            return plain(*args, **options)

        monkeypatch.setattr(immediate, "time", clock)
        monkeypatch.setattr(Publisher, step, slowly)

    return make


def test_what_the_time_does_not_suffice_for_is_released_and_opens_no_circuit(
    alias, app, states, slow, monkeypatch
):
    """The broker answers: it is only slow for so many."""
    woken = []
    monkeypatch.setattr(immediate, "wake", lambda using, channel: woken.append(using))
    slow("_send", 15)
    _call(app, alias, 1, 2, 3)  # within 20 seconds a second one begins
    assert (states(), woken) == (["ready"], [alias])
    assert not immediate.broker_of(app.main).circuit.failures


def test_a_broker_that_takes_nothing_in_its_time_is_waited_for_by_no_other_commit(
    alias, app, states, slow
):
    slow("open", 25)
    _call(app, alias, 1)
    assert states() == ["ready"]
    assert immediate.broker_of(app.main).circuit.failures == 1


def test_events_for_monitors_end_with_the_time(alias, app, states, monkeypatch):
    """They leave before the rows are deleted: no commit waits for many, and no hold runs out."""
    app.conf.task_send_sent_event = True
    clock, sent = SimpleNamespace(now=0.0, monotonic=lambda: clock.now), []

    def slowly(*args, **options):
        clock.now += 15
        sent.append(args)

    monkeypatch.setattr(immediate, "time", clock)
    monkeypatch.setattr(app.amqp._event_dispatcher, "publish", slowly)
    _call(app, alias, 1, 2, 3)  # within 20 seconds a second one begins
    assert (len(sent), states()) == (2, [])
    assert not immediate.broker_of(app.main).circuit.failures


def test_a_hold_that_ran_out_before_the_commit_is_released(alias, app, states, on):
    on(IMMEDIATE_HOLD=1, IMMEDIATE_TIMEOUT=0.6)
    _call(app, alias, 1)
    assert states() == ["ready"]


def test_what_a_broker_refuses_is_dead_by_the_drain_with_its_reason(
    alias, app, rabbitmq_url, states
):
    app.conf.broker_url = rabbitmq_url
    with transaction.atomic(using=alias):
        app.tasks["note"].apply_async(("", 1), exchange="nowhere", routing_key="k")
        app.tasks["note"].delay("", 2)
    assert states() == ["ready"]
    assert drain(alias).dead == 1


@pytest.mark.parametrize("point", ["immediate_claimed", "immediate_published"])
def test_a_process_that_ends_in_between(alias, app, at, states, run_out, book, point):
    """The sweep writes the incident, with the ids, before it publishes."""
    jobs = book(alias)

    def end():
        raise SystemExit

    def check():
        [incident] = Incident.objects.using(alias).all()
        assert incident.kind == "unknown"
        [(id, shard)] = jobs.jobs.values()
        assert (incident.first_id, incident.last_id, incident.shards) == (id, id, [shard])

    at(point, end)
    with pytest.raises(SystemExit):
        _call(app, alias, 1)
    jobs.note()
    assert drain(alias).published == 0
    assert states() == ["held"]

    run_out()
    at("checked", check)
    assert drain(alias).published == 1
    jobs.receive(app)
    jobs.assert_complete()
    assert len(jobs.twice) == (point == "immediate_published")


def test_an_incident_is_written_once_while_the_broker_is_away(alias, app, at, run_out, states):
    at("immediate_claimed", lambda: 1 / 0)
    _call(app, alias, 1)  # an error does not reach the caller
    run_out()
    app.conf.broker_url = AWAY
    drainer = Drain(using=alias)
    drainer.run_once()
    for each in drainer._apps.values():
        each.backoff.succeeded()
    drainer.run_once()
    drainer._leave()
    assert Incident.objects.using(alias).count() == 1
    assert states() == ["ready"]


@pytest.mark.parametrize("alias", ["postgres"], indirect=True)
def test_an_outcome_that_is_not_known_stays_held(
    alias, broker_url, proxy, make_named_app, book, states, run_out, on
):
    on(IMMEDIATE_TIMEOUT=1)
    link, url = proxy(broker_url)
    app, jobs = make_named_app(url), book(alias)
    _call(app, alias, 1)
    jobs.receive(app, url=broker_url)
    link.mode = "drop_reply"
    with transaction.atomic(using=alias):
        app.tasks["note"].delay("", 2)
        jobs.note()
    assert states() == ["held"]
    [publisher] = immediate.broker_of(app.main)._idle
    assert publisher._doubtful  # before it sends again it asks whether the broker takes messages
    link.mode = "pass"
    run_out()
    assert drain(alias).published == 1
    jobs.receive(app, url=broker_url)
    assert [body[1] for body in jobs.bodies] == [1, 2, 2]
    assert Incident.objects.using(alias).get().kind == "unknown"


def test_a_job_that_was_sent_twice_has_its_incident(alias, app, states, book, run_out, monkeypatch):
    """A batch whose outcome was unknown went again, one by one, and was accepted."""
    publish, jobs = Publisher.publish, book(alias)

    def again(*args, **options):
        result = publish(*args, **options)
        result.unknown += result.accepted
        return result

    with monkeypatch.context() as patched:
        patched.setattr(Publisher, "publish", again)
        _call(app, alias, 1)
    assert states() == ["held"]
    jobs.note()
    run_out()
    drain(alias)
    jobs.receive(app)
    assert jobs.twice
    jobs.assert_complete()


@pytest.mark.parametrize("alias", ["postgres"], indirect=True)
def test_a_job_that_one_of_two_queues_refuses_has_an_incident(
    alias, redis_url, make_named_app, states, run_out
):
    """The drain tries it again, and the other queue takes it a second time."""
    app = make_named_app(redis_url)
    exchange = Exchange(f"{app.main}-both", type="direct")
    with app.connection_for_write() as connection:
        channel = connection.default_channel
        for name in ("one", "other"):
            Queue(f"{app.main}-{name}", exchange, "both")(channel).declare()
        channel.client.set(f"{app.main}-other", "no list")
        route = {"exchange": exchange.name, "routing_key": "both"}
        with transaction.atomic(using=alias):
            app.tasks["note"].apply_async(("", 1), **route)
        assert states() == ["held"]
        run_out()
        drain(alias)
        assert channel.client.llen(f"{app.main}-one") == 2
    assert Incident.objects.using(alias).filter(kind="unknown").exists()


@pytest.mark.parametrize("alias", ["postgres"], indirect=True)
def test_a_connection_that_the_broker_has_closed_is_replaced(
    alias, broker_url, proxy, make_named_app, book, states
):
    link, url = proxy(broker_url)
    app, jobs = make_named_app(url), book(alias)
    for i in range(2):
        _call(app, alias, i)
        link.cut()
    assert states() == []
    assert len(jobs.receive(app, url=broker_url)) == 2


@pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)
def test_threads_have_connections_of_their_own(alias, broker_url, make_named_app, book):
    app, jobs = make_named_app(broker_url), book(alias)

    def work(number):
        try:
            for i in range(10):
                _call(app, alias, number * 100 + i)
        finally:
            connections[alias].close()

    threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    jobs.receive(app)
    assert len({body[1] for body in jobs.bodies}) == len(jobs.sent) == 40
    assert not StagedJob.objects.using(alias).exists()


@pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)
def test_a_conflict_with_what_others_commit_leaves_no_row(alias, app, states):
    """At SERIALIZABLE any statement may be refused for that, the DELETE too."""
    connection, refused = connections[alias], []
    refusals = {
        "postgresql": "DO $$ BEGIN RAISE SQLSTATE '40001'; END $$",
        "mysql": "SIGNAL SQLSTATE '40001' SET MYSQL_ERRNO = 1213",
    }

    def refuse_once(execute, sql, params, many, context):
        if sql.startswith("DELETE") and not refused:
            refused.append(sql)
            sql, params = refusals[connection.vendor], None
        return execute(sql, params, many, context)

    with connection.execute_wrapper(refuse_once):
        _call(app, alias, 1)
    assert len(refused) == 1
    assert states() == []


def test_a_connection_is_kept_for_the_next_commit_where_the_pool_may_hold_it(
    alias, app, states, monkeypatch
):
    broker, closed, close = immediate.broker_of(app.main), [], Publisher.close
    monkeypatch.setattr(Publisher, "close", lambda each: (closed.append(each), close(each)))
    _call(app, alias, 1)
    [kept] = broker._idle
    _call(app, alias, 2)
    assert (broker._idle, closed) == ([kept], [])
    app.conf.broker_pool_limit = 0
    _call(app, alias, 3)
    assert (states(), broker._idle, closed) == ([], [], [kept])


def test_a_pause_that_begins_before_the_commit_keeps_it_from_the_broker(
    alias, app, publishes, states
):
    circuit = immediate.broker_of(app.main).circuit
    with transaction.atomic(using=alias):
        app.tasks["note"].delay("", 1)
        circuit.failed(OSError("away"))  # another thread's
        circuit._until += 600
    assert (states(), publishes) == (["ready"], [])


def test_an_app_that_is_gone_by_the_commit_leaves_its_jobs_to_the_drain(
    alias, app, states, monkeypatch
):
    monkeypatch.setattr(immediate, "celery_app", lambda name: None)
    _call(app, alias, 1)
    assert states() == ["ready"]
    assert not immediate.broker_of(app.main).circuit.failures


def test_a_failure_drops_the_connections_that_wait_too(alias, app, monkeypatch):
    broker, closed = immediate.broker_of(app.main), []
    other, taken = Publisher(app, timeout=1), Publisher(app, timeout=1)
    broker._idle += [other, taken]
    result = PublishResult(error=OSError("away"))
    monkeypatch.setattr(Publisher, "publish", lambda *args, **options: result)
    monkeypatch.setattr(Publisher, "close", lambda publisher: closed.append(publisher))
    _call(app, alias, 1)
    assert (closed, broker._idle) == ([other], [taken])


@pytest.mark.parametrize("alias", ["default"])
@pytest.mark.parametrize("line", range(1, 5))
def test_two_threads_may_drop_them_at_once(line, alias, app):
    broker = immediate.Broker(app.main)
    broker._idle.append(Publisher(app, timeout=1))
    with at_line(line, immediate.Broker.close, broker.close):
        broker.close()
    assert not broker._idle


def test_one_that_tries_and_is_interrupted_at_any_line_keeps_no_other_from_it(alias, app, on):
    """As by Celery's soft time limit: the next one tries when the time of this one is over."""
    on(IMMEDIATE_TIMEOUT=5)
    broker, number, is_there = immediate.broker_of(app.main), 0, True
    while is_there:
        broker.circuit.failed(OSError("away"))
        broker.circuit._until = 0
        with raising_at(number, [immediate], ["publish", "_send"]) as left, suppress(SoftLimit):
            next(own_state(lambda: broker.publish([], using="", deadline=time.monotonic() + 5)))
        is_there = left[0] < 0
        assert broker.circuit.remaining < 10, number
        broker.circuit._until = 0
        broker.publish([], using="", deadline=time.monotonic() + 5)
        assert not broker.circuit.failures, number
        number += 1
    assert number > 10


def test_one_that_is_interrupted_drops_its_connection(alias, app, monkeypatch):
    """As by a time-out of gevent: an answer may come that is no other commit's."""
    closed = []

    def interrupt(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(immediate.Publisher, "publish", interrupt)
    monkeypatch.setattr(immediate.Publisher, "close", lambda publisher: closed.append(publisher))
    with pytest.raises(KeyboardInterrupt):
        _call(app, alias, 1)
    assert len(closed) == 1


class Answer(Exception):
    """An error of a transport's library."""


@pytest.mark.parametrize(
    "place", ["_send", "_declare", "prepare", "event", "delete", "count", "library"]
)
def test_a_time_limit_of_the_callers_task_reaches_it(alias, app, monkeypatch, place, states):
    """Otherwise the task goes on until a harder limit kills its worker."""

    def interrupt(*args, **kwargs):
        raise SoftTimeLimitExceeded

    def interrupt_library(*args, **kwargs):
        """As boto, which raises an error of its own for any other."""
        try:
            interrupt()
        except SoftTimeLimitExceeded as error:
            raise Answer from error

    owners = {"prepare": [outcome, "_by_itself"], "delete": [immediate, "delete"]}
    owners["count"] = [counters.Minute, "add"]
    owners["library"] = [Publisher, "_send"]
    owners["event"] = [app.amqp._event_dispatcher, "publish"]
    app.conf.task_send_sent_event = place == "event"
    owner, name = owners.get(place, [Publisher, place])
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, interrupt)
        if place == "library":
            patch.setattr(owner, name, interrupt_library)
            patch.setattr(Publisher, "_takes_batches", lambda publisher: False)
        with pytest.raises(SoftTimeLimitExceeded):
            _call(app, alias, 1)
    # A statement that was interrupted would let the next one fail.
    assert alias == "default" or connections[alias].connection is None
    assert states() == ([] if place == "count" else ["held"])
    assert not immediate.broker_of(app.main).circuit.failures
    monkeypatch.setattr(Publisher, "_send", lambda *args: 1 / 0)
    try:
        raise SoftTimeLimitExceeded
    except SoftTimeLimitExceeded:  # it is being handled: no later error is because of it
        _call(app, alias, 2)


def test_one_that_cannot_log_its_error_does_not_reach_the_caller(alias, app, at, monkeypatch):
    at("immediate_claimed", lambda: 1 / 0)
    monkeypatch.setattr(immediate.logger, "exception", lambda *args: 1 / 0)
    _call(app, alias, 1)


def test_figures(alias, app, at, run_out, caplog):
    at("immediate_claimed", lambda: 1 / 0)
    _call(app, alias, 1)
    assert f"Immediate delivery failed database={alias}" in caplog.messages
    run_out()
    drain(alias)
    set_failpoint("immediate_claimed", None)
    _call(app, alias, 2, 3)
    counters._shared[alias, None]._tried_at = float("-inf")  # the next one writes
    immediate.broker_of(app.main).circuit.failed(OSError("away"))
    immediate.broker_of(app.main).circuit._until = 0
    immediate.broker_of(app.main).close()
    app.conf.broker_url = AWAY
    _call(app, alias, 4)

    totals = dict.fromkeys(("immediate", "published"), 0)
    for row in Statistic.objects.using(alias).filter(name__in=totals):
        totals[row.name] += row.value
    assert totals == {"immediate": 2, "published": 3}


@pytest.mark.parametrize("zone", ["Asia/Kolkata", "America/Chicago"])
def test_figures_without_time_zones(alias, app, settings, monkeypatch, zone):
    """The host's minute is written in the zone in which the database tells the time."""
    settings.USE_TZ, settings.TIME_ZONE = False, zone
    monkeypatch.setattr(counters, "EVERY", 0)
    _call(app, alias, 1, 2)
    found = series(using=alias, minutes=10)
    assert (sum(found.immediate), sum(found.published)) == (2, 2)
