"""A wrongly deployed drainer reports it, and harms no job."""

from __future__ import annotations

import re

import pytest
from django.core.management import CommandError, call_command
from django.db import connections, transaction
from kombu import VERSION, Producer, Queue

from outbox_app.jobs.drain import app_drain
from outbox_app.jobs.drain.drain import Drain
from outbox_app.models import DeadJob, Process, StagedJob
from tests import tasks


@pytest.mark.django_db(transaction=True)
def test_without_any_app_the_jobs_wait(alias, make_app, monkeypatch):
    app = make_app()
    note = app.task(name="note")(tasks.note)
    with transaction.atomic(using=alias):
        note.delay("", 1)
    monkeypatch.setattr(app_drain, "celery_app", lambda name: None)
    monkeypatch.setattr(app_drain, "staging_apps", list)
    drain = Drain(using=alias)

    for _ in range(3):
        drain.run_once()

    assert StagedJob.objects.using(alias).count() == 1
    assert "loaded: none" in drain.trouble
    monkeypatch.undo()
    drain.holder.leave()
    assert Drain(using=alias).run(once=True).published == 1


@pytest.mark.django_db(transaction=True)
def test_a_job_of_an_app_that_is_not_loaded_dies_and_names_those_that_are(alias, make_app):
    app = make_app()
    note = app.task(name="note")(tasks.note)
    with transaction.atomic(using=alias):
        note.delay("", 1)
    StagedJob.objects.using(alias).update(app="renamed")

    drain = Drain(using=alias)
    drain.run_once()
    drain._beat_if_due(at_once=True)
    shown = Process.objects.using(alias).get()
    assert (drain.tally.dead, shown.done, shown.dead) == (1, 0, 1)
    drain.holder.leave()

    dead = DeadJob.objects.using(alias).get()
    assert dead.error == "outbox_app.exceptions.UnknownApp"
    assert "'renamed'" in dead.reason
    assert repr(app.main) in dead.reason


@pytest.mark.parametrize("command", ["drain_outbox", "outbox_dead list", "outbox_prune --inbox"])
def test_tables_that_are_missing_are_said_to_be(command, tmp_path, django_db_blocker):
    connections.settings["empty"] = {
        **connections.settings["default"],
        "NAME": str(tmp_path / "empty.sqlite3"),
    }
    try:
        with (
            django_db_blocker.unblock(),
            pytest.raises(CommandError, match="migrate outbox_app --database empty") as refused,
        ):
            call_command(*command.split(), "--database", "empty")
        assert refused.value.returncode == 2
    finally:
        connections["empty"].close()
        del connections["empty"]
        del connections.settings["empty"]


@pytest.mark.django_db(transaction=True)
def test_kombu_without_batches_is_said(alias, make_app, monkeypatch, caplog):
    make_app()
    said = []
    for batches in (True, False):
        if not batches:
            monkeypatch.delattr(Producer, "batch", raising=False)
        caplog.clear()
        call_command("drain_outbox", "--once", "--database", alias)
        said.append(caplog.text)
    with_batches, without = said
    sentence = 'Drainer is slow reason="kombu [0-9.]+ publishes each job singly'
    assert re.search(sentence, without)
    assert not re.search(sentence, with_batches) or VERSION < (5, 7)


@pytest.mark.django_db(transaction=True)
def test_a_job_of_a_queue_that_the_configuration_has_no_more_says_so(alias, make_app):
    """A deployment has taken the queue out of ``task_queues`` while jobs waited."""
    conf = {"task_create_missing_queues": False, "task_default_queue": "kept"}
    app = make_app(task_queues=[Queue("kept"), Queue("gone")], **conf)
    note = app.task(name="note")(tasks.note)
    with transaction.atomic(using=alias):
        note.apply_async(("", 1), queue="gone")
        note.apply_async(("", 2), queue="kept")
    app.conf.task_queues = [Queue("kept")]
    vars(app.amqp).pop("queues")

    tally = Drain(using=alias).run(once=True)
    assert (tally.published, tally.dead) == (1, 1)
    dead = DeadJob.objects.using(alias).get()
    assert dead.error == "outbox_app.exceptions.Undeliverable"
    assert "Queue 'gone' is not in task_queues" in dead.reason
