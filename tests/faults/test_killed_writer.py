"""A writer is killed inside its transaction, or right after it sent COMMIT: both rows or neither.

The writer knows three outcomes, committed, rolled back and unknown; the data has only two.
"""

from __future__ import annotations

import subprocess
import sys
from datetime import timedelta

import pytest
from django.contrib.auth.models import Group
from django.db import connections, transaction
from django.db.utils import OperationalError

from outbox_app.database.clock import DatabaseNow
from outbox_app.models import Incident, StagedJob
from tests import forking, tasks
from tests.servers import processes

from . import project
from .tools import ROOT, drain, eventually, on

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(params=[False, True], ids=["drained", "immediate"])
def immediate(request):
    """Whether the writer publishes right after its commit. If not, only the drain publishes."""
    return request.param


@pytest.fixture
def start_writer(environment, immediate):
    """``start_writer(alias, app, name, url=…)``: a process that has written its two rows."""
    started = []

    def start(alias, app, name, **variables):
        writer = forking.Popen(
            [sys.executable, "-m", "tests.faults.writer", name],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={
                **environment(alias),
                **project.variables({app.main: app.conf.broker_url}, IMMEDIATE=immediate),
                **variables,
            },
        )
        processes.guard_process(writer.pid)
        started.append(writer)
        assert writer.stdout.readline() == "written\n"
        return writer

    yield start
    for writer in started:
        writer.kill()
        writer.communicate()
        processes.forget_process(writer.pid)


def sweep(alias, incidents):
    """Drain after the hold of the writer that died; the sweep notes each unknown outcome."""
    StagedJob.objects.using(alias).update(available_at=DatabaseNow() - timedelta(seconds=1))
    drain(alias)
    assert Incident.objects.using(alias).count() == incidents


@on("postgres", "mariadb", "default")
def test_inside_its_transaction(alias, redis_url, make_named_app, start_writer, book):
    app, jobs = make_named_app(redis_url), book(alias)
    writer = start_writer(alias, app, "killed")
    writer.kill()
    writer.wait()

    drain(alias)
    # Gone without waiting for anything: the row is rolled back, and it blocked nobody.
    eventually(lambda: not StagedJob.objects.using(alias).exists())
    assert not Group.objects.using(alias).exists()
    assert jobs.receive(app) == []


@pytest.mark.parametrize("request_arrives", [True, False])
@on("postgres", "mariadb")
def test_right_after_it_sent_commit(
    alias,
    request_arrives,
    immediate,
    redis_url,
    proxy,
    environment,
    make_named_app,
    start_writer,
    book,
):
    app, jobs = make_named_app(redis_url), book(alias)
    variable = f"{alias.upper()}_URL"
    link, url = proxy(environment(alias)[variable])
    writer = start_writer(alias, app, "killed", **{variable: url})
    link.mode = "drop_reply" if request_arrives else "blackhole"
    writer.stdin.write("\n")
    writer.stdin.flush()
    if request_arrives:
        eventually(Group.objects.using(alias).exists, "COMMIT has arrived")
    writer.kill()
    writer.wait()
    link.cut()

    sweep(alias, incidents=int(immediate and request_arrives))
    jobs.receive(app)
    sent = [name for name, _ in jobs.bodies]
    business = list(Group.objects.using(alias).values_list("name", flat=True))
    assert sent == business == (["killed"] if request_arrives else [])


@on("postgres", "mariadb")
def test_whose_connection_is_lost_at_commit(
    alias, immediate, redis_url, proxy, environment, make_named_app, start_writer, book
):
    """It lives, and sees an error although both rows are there."""
    app, jobs = make_named_app(redis_url), book(alias)
    variable = f"{alias.upper()}_URL"
    link, url = proxy(environment(alias)[variable])
    writer = start_writer(alias, app, "cut", **{variable: url})
    link.mode = "cut_on_reply"
    output, _ = writer.communicate("\n")
    assert "committed" not in output
    assert writer.returncode != 0

    sweep(alias, incidents=int(immediate))
    jobs.receive(app)
    assert [name for name, _ in jobs.bodies] == ["cut"]
    assert Group.objects.using(alias).filter(name="cut").exists()


@on("mariadb")
def test_whose_lock_wait_times_out_while_staging(alias, make_app):
    """InnoDB undoes the statement only; the business row must not be committed without the job."""
    note = make_app().task(name="note")(tasks.note)
    blocker = connections.create_connection(alias)
    with blocker.cursor() as cursor:
        cursor.execute("SET SESSION TRANSACTION ISOLATION LEVEL REPEATABLE READ")
    blocker.set_autocommit(False)
    with blocker.cursor() as cursor:
        cursor.execute("SELECT id FROM outbox_stagedjob WHERE id > 0 FOR UPDATE")  # and the gap
    with connections[alias].cursor() as cursor:
        cursor.execute("SET innodb_lock_wait_timeout = 1")
    try:
        with transaction.atomic(using=alias):
            Group.objects.using(alias).create(name="lonely")
            with pytest.raises(OperationalError, match="Lock wait timeout"):
                note.delay("", 0)
            # Whoever catches it can do nothing more, and is rolled back.
            with pytest.raises(transaction.TransactionManagementError):
                Group.objects.using(alias).exists()
    finally:
        blocker.close()
        connections[alias].close()
    assert not Group.objects.using(alias).exists()
    assert not StagedJob.objects.using(alias).exists()
