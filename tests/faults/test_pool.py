"""Django's pool in the settings: processes and parts have their own connections."""

from __future__ import annotations

import asyncio
import json
from concurrent.futures import ThreadPoolExecutor

import pytest
from django.db import connections, transaction

from outbox_app.checks.databases import check_sessions
from outbox_app.entities.testing import at_once
from outbox_app.ids.generator import Snowflakes
from outbox_app.models import Process, StagedJob
from outbox_app.process import background
from tests.entities.models import Account

from .tools import assert_handed_back, eventually, listeners, on

pytestmark = [pytest.mark.django_db(transaction=True), on("postgres")]
pytest.importorskip("psycopg_pool")


def test_processes_share_no_connection(alias, redis_url, make_named_app, start_drainer, book):
    """Forked with an open pool, two drainers would talk through one socket."""
    app, jobs = make_named_app(redis_url), book(alias)
    drainer = start_drainer(alias, app, "--processes", "2", FAULTS_POOL="1")
    eventually(lambda: Process.objects.using(alias).count() == 2, "both run")
    for i in range(20):
        jobs.stage(app, 50, key=f"{i}")
    eventually(lambda: not StagedJob.objects.using(alias).exists(), "drained")
    assert drainer.stop() == 0
    jobs.receive(app)
    jobs.assert_exact()
    assert_handed_back(alias)
    assert "Unavailable" not in drainer.output


def test_all_parts_of_a_process_run(alias, redis_url, make_named_app, start_drainer, book):
    """They have six connections: a pool has four."""
    app, jobs = make_named_app(redis_url), book(alias)
    jobs.stage(app, 10)
    variables = {"OUTBOX_TEST_SUBSCRIBER": json.dumps({"name": "noted"}), "FAULTS_POOL": "1"}
    process = start_drainer(alias, app, command="run_outbox", **variables)
    rows = Process.objects.using(alias)
    resources = {"jobs", "prepared", "retention", "subscription:noted"}
    eventually(lambda: {row.resource for row in rows.all()} == resources, "all parts run")
    eventually(lambda: not StagedJob.objects.using(alias).exists(), "drained")
    eventually(lambda: listeners(alias) == 2, "drainer and subscription listen")
    assert process.stop() == 0
    assert_handed_back(alias)
    assert "Unavailable" not in process.output


def test_the_check_that_listens_takes_none_of_the_pool(alias, pool_of_one):
    """It warned of a pooler where a small pool had no connection left."""
    assert check_sessions(databases=[alias]) == []


def test_callers_at_one_moment_take_none_of_the_pool(alias, pool_of_one):
    """In a test of a project, those beyond the pool's size waited, and all failed."""
    assert at_once(*[StagedJob.objects.using(alias).count] * 3, using=alias) == [0, 0, 0]


def test_what_is_committed_apart_takes_none_of_the_pool(alias, pool_of_one):
    """Threads that had all of its connections, and waited for ids, got none."""
    with transaction.atomic(using=alias):
        assert not StagedJob.objects.using(alias).exists()
        assert Snowflakes().make()


def test_threads_that_live_on_keep_none_of_the_pool(alias, pool_of_one, monkeypatch):
    """They had all of its connections for as long as there was work."""
    monkeypatch.setattr(background, "IDLE", 60)
    calls, seen = background.Background("test", threads=1, longest=1, together=1, at_exit=0), []
    calls.send(lambda items: seen.append(StagedJob.objects.using(alias).count()), [1])
    assert calls.drain(20)
    assert seen == [StagedJob.objects.using(alias).count()]


def test_coroutines_whose_requests_have_all_of_the_pool(alias, pool_of_one, fresh):
    assert not Account.objects.using(alias).exists()  # has the only one
    asyncio.run(Account.aexecute("a", "refuse_to_open", command_id="x", using=alias))


def test_threads_that_wait_for_one_without_a_connection(alias, pool_of_one):
    """It led, and waited for the connection of those that waited for it."""
    assert not Account.objects.using(alias).exists()  # has the only one
    pool = connections[alias].pool

    def ask(command_id):
        return Account.execute("a", "refuse_to_open", command_id=command_id, using=alias).version

    def ask_there():
        try:
            return ask("x")
        finally:
            connections.close_all()

    with ThreadPoolExecutor(1) as executor:
        other = executor.submit(ask_there)
        eventually(lambda: pool.get_stats().get("requests_waiting"), "it waits")
        assert ask("y") == 1
        connections[alias].close()
        assert other.result() == 2
