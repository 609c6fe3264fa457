"""The promise of a local event table: a job is staged in the transaction, published right after it,
and deleted; the drain sends the rest if the process dies, stops or is cut off in between.

Each process is a fork of the test's: it inherits connections, as in a prefork server.
"""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
from django.contrib.auth.models import Group
from django.db import connections, transaction

from outbox_app.database.clock import DatabaseNow
from outbox_app.failpoints import set_failpoint
from outbox_app.jobs import immediate
from outbox_app.models import Incident, StagedJob

from .tools import drain, on

pytestmark = pytest.mark.django_db(transaction=True)
at_each_point = pytest.mark.parametrize(
    "point", ["immediate_claimed", "immediate_published", "immediate_deleted"]
)


@pytest.fixture(params=["redis", "rabbitmq"])
def app(request, make_named_app, settings):
    outbox = {"IMMEDIATE": True, "IMMEDIATE_TIMEOUT": 20, "IMMEDIATE_HOLD": 600}
    settings.OUTBOX = {**settings.OUTBOX, **outbox}
    yield make_named_app(request.getfixturevalue(f"{request.param}_url"))
    for broker in immediate._brokers.values():
        broker.close()
    immediate._brokers.clear()


@pytest.fixture
def place(alias, app):
    """``place(number)``: a business row and a job."""

    def commit(number):
        with transaction.atomic(using=alias):
            Group.objects.using(alias).create(name=str(number))
            app.tasks["note"].delay("", number)

    return commit


@pytest.fixture
def fork(alias, place):
    """``fork(point, signal)``: a process that commits, and gets the signal at the failpoint."""
    children = []

    def start(point, number):
        if child := os.fork():
            children.append(child)
            return child, os.waitpid(child, os.WUNTRACED)[1]
        try:
            connections[alias] = connections.create_connection(alias)
            set_failpoint(point, lambda: os.kill(os.getpid(), number))
            place(2)
        finally:
            os._exit(0)

    return start


@pytest.fixture
def swept(alias, app, book):
    """``swept(point)``: after the holds, no job is left or lost, and duplicates are explained.

    Only a job that was published and not yet deleted at the failpoint is published twice.
    """
    jobs = book(alias)

    def check(point, numbers):
        jobs.receive(app)  # those without a row are as they should be
        jobs.jobs = dict.fromkeys(jobs.sent, (0, 0))
        jobs.note()
        past = DatabaseNow() - timedelta(seconds=1)
        assert drain(alias).published == 0  # while the hold lasts
        StagedJob.objects.using(alias).update(available_at=past)
        drain(alias)
        jobs.receive(app)
        jobs.assert_complete()
        assert sorted({number for _, number in jobs.bodies}) == numbers
        assert len(jobs.twice) == (point == "immediate_published")
        assert Incident.objects.using(alias).count() == (point != "immediate_deleted")
        names = Group.objects.using(alias).values_list("name", flat=True)
        assert sorted(map(int, names)) == numbers

    return check


@at_each_point
def test_killed(alias, fork, place, swept, point):
    place(1)  # opens the connection that the child inherits
    _, status = fork(point, signal.SIGKILL)
    assert os.WTERMSIG(status) == signal.SIGKILL
    place(3)  # and that the child has left alone
    swept(point, [1, 2, 3])


@at_each_point
def test_stopped_until_the_drain_has_taken_over(alias, app, fork, swept, book, point):
    """It has looked at its clock before it was stopped, so it publishes when it goes on."""
    child, status = fork(point, signal.SIGSTOP)
    assert os.WIFSTOPPED(status)
    swept(point, [2])
    os.kill(child, signal.SIGCONT)
    assert os.waitpid(child, 0)[1] == 0
    late = book(alias).receive(app)
    assert len(late) == (point == "immediate_claimed")
    assert not StagedJob.objects.using(alias).exists()


@at_each_point
@on("postgres", "mariadb")
def test_cut_off_from_its_database(alias, app, place, book, point):
    jobs = book(alias)

    def cut():
        jobs.note()
        with connections.create_connection(alias).cursor() as other:
            raw = connections[alias].connection
            if alias == "postgres":
                other.execute("SELECT pg_terminate_backend(%s, 5000)", [raw.info.backend_pid])
            else:
                other.execute(f"KILL {raw.thread_id()}")
            other.connection.close()

    set_failpoint(point, cut)
    try:
        place(1)  # no error reaches the caller
    finally:
        set_failpoint(point, None)
        connections[alias].close()
    left = StagedJob.objects.using(alias)
    assert left.count() == (point != "immediate_deleted")
    left.update(available_at=DatabaseNow() - timedelta(seconds=1))
    drain(alias)
    assert len(jobs.receive(app)) == 1 + (point != "immediate_deleted")
    assert Incident.objects.using(alias).count() == (point != "immediate_deleted")
