"""``manage.py drain_outbox``: its options, its lines, its exit codes, in real processes."""

from __future__ import annotations

import os
import signal

import pytest

from outbox_app.models import Process, StagedJob

from .tools import assert_handed_back, eventually, on

pytestmark = [pytest.mark.django_db(transaction=True), on("postgres")]


def test_once_drains_what_is_there_and_says_what_it_left(
    alias, redis_url, make_named_app, start_drainer, book
):
    app, jobs = make_named_app(redis_url), book(alias)
    jobs.stage(app, 30)
    held = jobs.stage(app, 2, countdown=4000)

    drainer = start_drainer(alias, app, "--once", "--batch-size", "7")

    assert drainer.wait() == 0
    assert "batch_size=7 interval=0.1" in drainer.output
    assert "Drainer stopped published=30 dead=0 held=2" in drainer.output
    assert set(jobs.receive(app)) == set(jobs.jobs) - set(held)
    assert_handed_back(alias)


def test_max_jobs_ends_after_the_batch_that_reaches_it(
    alias, redis_url, make_named_app, start_drainer, book
):
    app, jobs = make_named_app(redis_url), book(alias)
    jobs.stage(app, 60, key="one")

    drainer = start_drainer(alias, app, "--max-jobs", "15", "--batch-size", "10")

    assert drainer.wait() == 0
    assert 15 <= len(jobs.receive(app)) <= 25
    assert StagedJob.objects.using(alias).count() == 60 - len(jobs.sent)
    assert_handed_back(alias)


def test_a_drainer_process_that_is_killed_is_replaced(
    alias, redis_url, make_named_app, start_drainer, book
):
    app, jobs = make_named_app(redis_url), book(alias)
    drainer = start_drainer(alias, app, "--processes", "2")

    def pids():
        return set(Process.objects.using(alias).values_list("pid", flat=True))

    first = eventually(lambda: len(pids()) == 2 and pids(), "two drainers")
    assert drainer.pid not in first
    os.kill(min(first), signal.SIGKILL)
    drainer.says("Process died")
    eventually(lambda: len(pids() - first) == 1, "a third one")
    jobs.stage(app, 200)
    eventually(lambda: not StagedJob.objects.using(alias).exists(), "drained")

    assert drainer.stop() == 0
    jobs.receive(app)
    jobs.assert_complete()


@pytest.mark.parametrize(
    "arguments",
    [
        ["--batch-size", "0"],
        ["--interval", "nan"],
        ["--processes", "0"],
        ["--max-jobs", "-1"],
        ["--database", "nowhere"],
        ["--batch-size", "many"],
    ],
    ids=" ".join,
)
def test_arguments_without_sense_are_refused(alias, start_drainer, arguments):
    drainer = start_drainer(alias, *arguments)
    assert drainer.wait() == 2
    assert arguments[0].lstrip("-") in drainer.output.lower()


def test_help_teaches(alias, start_drainer):
    drainer = start_drainer(alias, "--help")
    assert drainer.wait() == 0
    for word in ("SIGTERM", "Exit codes", "--interval", "--processes", "LEASE_SECONDS"):
        assert word in drainer.output
