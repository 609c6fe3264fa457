"""Shadow mode: jobs are sent as before, also recorded, and compared by key; none is sent twice."""

from __future__ import annotations

import asyncio
import os
import queue
import re
import signal
import sys
from contextlib import closing, suppress
from datetime import timedelta
from threading import Thread
from uuid import uuid4

import pytest
from asgiref.sync import sync_to_async
from celery import Celery, group
from celery.exceptions import Retry, SoftTimeLimitExceeded
from django.contrib.auth import get_user_model
from django.core.management import call_command
from django.db import Error, connections, transaction
from django.http import HttpResponse
from django.urls import path
from django.utils import timezone
from kombu import Producer
from kombu.exceptions import OperationalError

from outbox_app import stage
from outbox_app.celery import OutboxCelery
from outbox_app.database.clock import DatabaseNow
from outbox_app.jobs.drain.drain import Drain
from outbox_app.models import StagedJob
from outbox_app.process import background
from outbox_app.shadow import comparison as shadow_comparison
from outbox_app.shadow import producer as shadow
from outbox_app.shadow.comparison import compare_batch, report
from outbox_app.shadow.models import ShadowJob, ShadowNote, ShadowResult
from tests import forking
from tests.jobs.staging import message_equality, tasks
from tests.jobs.staging.test_rules import FORMS
from tests.jobs.staging.transactions import rolled_back
from tests.patience import eventually, patience

pytestmark = pytest.mark.django_db(transaction=True)
on_sqlite = pytest.mark.parametrize("alias", ["default"])


@pytest.fixture(autouse=True)
def notes_end_with_the_test(monkeypatch):
    monkeypatch.setattr(background, "IDLE", 0.01)
    yield
    assert shadow.writer.drain(patience())
    eventually(lambda: not shadow.writer.threads)


@pytest.fixture
def in_shadow(settings):
    settings.OUTBOX = {**settings.OUTBOX, "TASK_MODES": {"*": "shadow"}}


@pytest.fixture
def outcomes(alias):
    """``outcomes()``: counts of findings for rows two hours old; ``outcomes(0)``: new rows."""

    def judged(hours=2):
        shadow.writer.drain(patience())
        for model in (ShadowJob, ShadowNote):
            model.objects.using(alias).update(at=DatabaseNow() - timedelta(hours=hours))
        found = report(using=alias)
        return {name: each.count for name, each in found.get("add", {}).items()}

    return judged


@pytest.fixture
def halves(alias):
    def count():
        shadow.writer.drain(patience())
        models = (ShadowJob, ShadowNote, StagedJob)
        return tuple(model.objects.using(alias).count() for model in models)

    return count


@pytest.mark.parametrize("send", FORMS.values(), ids=FORMS)
@on_sqlite
def test_in_each_form_it_is_sent_at_once_and_recorded(send, alias, add, sent, halves, in_shadow):
    with transaction.atomic(using=alias):
        send(add)
        messages = sent()
        assert messages
    assert halves() == (len(messages), len(messages), 0)


def test_sent_before_its_commit(alias, add, sent, halves, outcomes, in_shadow):
    with transaction.atomic(using=alias):
        add.delay(1, 1)
        group(add.s(2, 2), add.s(3, 3)).delay()
        add.apply_async((4, 4), ordering_key="k", immediate=True)
    assert len(sent()) == 4
    assert outcomes(0) == {"early": 4}
    assert halves() == (0, 0, 0)
    assert outcomes() == {"early": 4}


@pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"])
def test_sent_after_its_commit(alias, add, sent, halves, outcomes, in_shadow):
    with transaction.atomic(using="default"), transaction.atomic(using=alias):
        add.delay_on_commit(1, 1)
        add.apply_async_on_commit((2, 2), task_id="mine")
        assert not sent()
    assert len(sent()) == 2
    assert outcomes(0) == {"matched": 2}
    assert halves() == (0, 0, 0)


def test_sent_for_a_rollback_is_known_after_an_hour(alias, add, sent, halves, outcomes, in_shadow):
    with rolled_back(alias):
        add.delay(1, 1)
    with transaction.atomic(using=alias), rolled_back(alias):
        add.delay(2, 2)
    assert len(sent()) == 2
    assert outcomes(0) == {}
    assert halves() == (0, 2, 0)
    assert outcomes() == {"rolled_back": 2}


def test_never_sent_where_the_broker_is_away_and_the_caller_goes_on(
    alias, add, halves, outcomes, in_shadow, monkeypatch, caplog
):
    def refuse(*args, **options):
        raise OperationalError("away")

    monkeypatch.setattr(Producer, "_publish", refuse)
    with pytest.raises(OperationalError), transaction.atomic(using=alias):
        add.delay(1, 1)
    assert halves() == (0, 0, 0)
    with transaction.atomic(using=alias), suppress(OperationalError):
        add.apply_async((1, 1), retry=False)
    assert outcomes(0) == {}
    assert halves() == (1, 0, 0)
    assert outcomes() == {"never_sent": 1}
    assert "Task committed and never sent task=add count=1" in caplog.text
    assert halves() == (0, 0, 0)


KILLED = """
from django.conf import settings
settings.DATABASES["default"] = settings.DATABASES[settings.OUTBOX["DATABASE"]]
settings.OUTBOX.update({"DATABASE": "default", "TASK_MODES": {"*": "shadow"}})
import django; django.setup()
import os, signal
from django.db import transaction
from outbox_app.celery import OutboxCelery
from outbox_app.shadow import producer as shadow
from tests import tasks
add = OutboxCelery("killed", broker="memory://").task(name="add")(tasks.add)
with transaction.atomic():
    add.delay_on_commit(0, 0)
shadow.writer.drain(60)
with transaction.atomic():
    transaction.on_commit(lambda: os.kill(os.getpid(), signal.SIGKILL))
    add.delay_on_commit(1, 1)
"""


def test_a_process_that_dies_between_commit_and_send(alias, environment, outcomes):
    done = forking.run(
        [sys.executable, "-c", KILLED], env=environment(alias), capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert outcomes() == {"matched": 1, "never_sent": 1}


@on_sqlite
def test_a_process_that_ends_writes_its_notes(alias, environment, outcomes):
    script = KILLED.replace("shadow.writer.drain(60)", "raise SystemExit")
    forking.run([sys.executable, "-c", script], env=environment(alias), check=True)
    assert outcomes(0) == {"matched": 1}


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_has_a_writer_of_its_own(alias, add, outcomes, in_shadow):
    with transaction.atomic(using=alias):
        add.delay(1, 1)
    if not (child := os.fork()):
        os._exit(shadow.writer.waiting.qsize() + len(shadow.writer.threads))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert outcomes() == {"early": 1}


@on_sqlite
def test_where_no_thread_can_be_started_notes_wait(
    alias, add, sent, in_shadow, monkeypatch, caplog
):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch, transaction.atomic(using=alias):
        patch.setattr(Thread, "start", refuse)
        add.delay(1, 1)
    assert "can't start new thread" in caplog.text
    assert not ShadowNote.objects.exists()
    with transaction.atomic(using=alias):
        add.delay(2, 2)
    assert len(sent()) == 2
    eventually(lambda: ShadowNote.objects.count() == 2)


@on_sqlite
def test_an_idle_writer_ends(alias, add, in_shadow):
    with transaction.atomic(using=alias):
        add.delay(1, 1)
    eventually(lambda: not shadow.writer.threads)
    assert ShadowNote.objects.count() == 1


@pytest.mark.parametrize("form", ["delay", "countdown", "chain", "group", "chord"])
@on_sqlite
def test_what_is_sent_is_what_celery_sends(form, alias, broker_url, inbox, in_shadow, halves):
    forms = {
        "countdown": lambda add: add.apply_async((1, 1), countdown=9, expires=60, priority=3),
        **FORMS,
    }
    options = {
        "name": f"app-{uuid4().hex[:12]}",
        "now": timezone.now(),
        "task_send_sent_event": True,
        "result_backend": "cache+memory://",
    }
    received, events = [], []
    for cls in (Celery, OutboxCelery):
        twin = message_equality.twin(cls, broker_url, **options)
        inbox.declare(twin.app.amqp.queues.values())
        with transaction.atomic(using=alias):
            forms[form](twin.add)
        messages = inbox.received()
        events.append(len(messages))
        messages = [each for each in messages if "task" in each["headers"]]  # events have times
        received.append(message_equality.normalised(messages))
        twin.close()
    assert received[0]
    assert received[1] == received[0]
    assert events[1] == events[0]
    assert halves() == (len(received[0]), len(received[0]), 0)


def test_shadow_rows_that_wait_are_not_published_when_the_task_is_staged(
    alias, add, sent, halves, in_shadow, settings
):
    with transaction.atomic(using=alias):
        add.delay(1, 1)
    settings.OUTBOX = {**settings.OUTBOX, "TASK_MODES": {}}
    with transaction.atomic(using=alias):
        add.delay(2, 2)
    assert halves() == (1, 1, 1)
    assert Drain(using=alias).run(once=True).published == 1
    assert sent() == [[1, 1], [2, 2]]


def test_a_drainer_compares(alias, add, halves, in_shadow, monkeypatch):
    monkeypatch.setattr(shadow_comparison, "INTERVAL", 0)
    monkeypatch.setattr(shadow_comparison, "LIMIT", 2)
    with transaction.atomic(using=alias):
        for _ in range(5):
            add.delay(1, 1)
    assert halves() == (5, 5, 0)
    drain = Drain(using=alias, interval=0.02)
    drain.on_turn = lambda drain: halves() == (0, 0, 0) and drain.stop()
    drain.run()
    [result] = ShadowResult.objects.using(alias)
    assert (result.task, result.outcome, result.count) == ("add", "early", 5)


def test_a_drainer_without_the_tables_drains(alias, add, sent, settings, monkeypatch, caplog):
    monkeypatch.setattr(shadow_comparison, "INTERVAL", 0)
    monkeypatch.setattr(ShadowNote._meta, "db_table", "outbox_nowhere")
    with transaction.atomic(using=alias):
        add.delay(1, 1)
    assert Drain(using=alias).run(once=True).published == 1
    assert "Unavailable what" in caplog.text


@pytest.mark.parametrize("alias", ["postgres", "mariadb"])
@pytest.mark.django_db(transaction=True)
def test_two_comparisons_count_once(alias, add, halves, settings, monkeypatch):
    settings.OUTBOX = {"DATABASE": alias, "TASK_MODES": {"*": "shadow"}}
    with transaction.atomic(using=alias):
        add.delay(1, 1)
    halves()
    count, other = shadow_comparison._count, Thread(target=compare_and_close, args=(alias,))

    def compare_first(*args, **options):
        monkeypatch.setattr(shadow_comparison, "_count", count)
        other.start()
        other.join()
        count(*args, **options)

    monkeypatch.setattr(shadow_comparison, "_count", compare_first)
    assert compare_batch(using=alias) == 0
    assert [each.count for each in ShadowResult.objects.using(alias)] == [1]


def compare_and_close(alias):
    compare_batch(using=alias)
    connections[alias].close()


def test_what_staging_would_refuse_is_sent_and_said(
    alias, add, sent, outcomes, in_shadow, settings, caplog
):
    settings.OUTBOX = {**settings.OUTBOX, "MAX_MESSAGE_BYTES": 10}
    with transaction.atomic(using=alias):
        add.delay(1, 1)
        add.delay(2, 2)
    assert len(sent()) == 2
    assert outcomes(0) == {"refused": 2}
    assert "Staging would refuse task=add" in caplog.text
    with pytest.raises(SystemExit, match="1"):
        call_command("outbox_shadow")


@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
@pytest.mark.parametrize("alias", ["default"])
def test_a_transaction_of_another_alias_only_would_be_refused(
    alias, add, sent, outcomes, in_shadow
):
    with transaction.atomic(using="postgres"):
        add.delay(1, 1)
    assert sent() == [[1, 1]]
    assert outcomes(0) == {"refused": 1}


@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
@pytest.mark.parametrize("alias", ["postgres"])
def test_a_call_after_the_commit_is_recorded_on_the_alias_it_names(
    alias, add, sent, outcomes, in_shadow
):
    with transaction.atomic(), transaction.atomic(using=alias):
        add.apply_async_on_commit((1, 1), using=alias)
    assert sent() == [[1, 1]]
    assert outcomes(0) == {"matched": 1}


@on_sqlite
def test_a_stamp_that_is_called_using_names_no_alias(alias, add, sent, in_shadow, caplog):
    with transaction.atomic(using=alias):
        add.apply_async_on_commit((1, 1), stamped_headers=["using"], using="nobody")
    assert sent() == [[1, 1]]
    assert "Shadow row not written task=add" in caplog.text


@pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"])
def test_a_row_that_cannot_be_written_costs_the_caller_nothing(
    alias, add, sent, halves, in_shadow, monkeypatch, caplog
):
    with monkeypatch.context() as patch, transaction.atomic(using=alias):
        patch.setattr(ShadowJob._meta, "db_table", "outbox_nowhere")
        add.delay(1, 1)
        add.delay_on_commit(2, 2)
        get_user_model()._default_manager.using(alias).create(username="kept")
    assert get_user_model()._default_manager.using(alias).count() == 1
    assert len(sent()) == 2
    assert caplog.text.count("Shadow row not written task=add") >= 2
    assert halves() == (0, 0, 0)


@pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)
@pytest.mark.parametrize("form", ["delay", "delay_on_commit"])
def test_a_connection_that_is_lost_meanwhile_is_the_callers_error(
    alias, add, sent, in_shadow, form
):
    """The end of the block would raise nothing, and the business row would be gone."""
    users, lost = get_user_model()._default_manager.using(alias), connections[alias]

    def kill(execute, sql, *args):
        if sql.startswith("INSERT") and "outbox_shadowjob" in sql:
            with closing(lost.copy()) as other, other.cursor() as killer:
                if alias == "postgres":
                    pid = lost.connection.info.backend_pid
                    killer.execute(f"SELECT pg_terminate_backend({pid}, 9000)")
                else:
                    killer.execute(f"KILL {lost.connection.thread_id()}")
        return execute(sql, *args)

    with lost.execute_wrapper(kill), transaction.atomic(using=alias):
        users.create(username="business")
        with pytest.raises(Error):
            getattr(add, form)(1, 1)
    assert not users.exists()
    assert sent() == []


@on_sqlite
@pytest.mark.parametrize("form", ["delay", "delay_on_commit"])
def test_a_time_limit_of_the_callers_task_reaches_it(alias, add, in_shadow, monkeypatch, form):
    def interrupt(*args, **kwargs):
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(shadow, "_write", interrupt)
    with transaction.atomic(using=alias), pytest.raises(SoftTimeLimitExceeded):
        getattr(add, form)(1, 1)


@pytest.mark.parametrize("alias", ["postgres"], indirect=True)
def test_a_call_in_a_transaction_that_is_to_be_rolled_back(alias, add, sent, outcomes, in_shadow):
    with transaction.atomic(using=alias):
        transaction.set_rollback(True, using=alias)
        add.delay(1, 1)
    assert sent() == [[1, 1]]
    assert outcomes() == {"rolled_back": 1}


def test_a_note_that_cannot_be_written_is_tried_again(
    alias, add, sent, halves, in_shadow, monkeypatch, caplog
):
    monkeypatch.setattr(shadow, "PAUSE", 0.01)
    with monkeypatch.context() as patch:
        patch.setattr(ShadowNote._meta, "db_table", "outbox_nowhere")
        with transaction.atomic(using=alias):
            add.delay(1, 1)
        eventually(lambda: "Shadow notes lost" in caplog.text)

    def put(call):
        raise queue.Full

    monkeypatch.setattr(shadow.writer.waiting, "put_nowait", put)
    with transaction.atomic(using=alias):
        add.delay(2, 2)
    assert "others are lost" in caplog.text
    assert sent() == [[1, 1], [2, 2]]
    assert halves() == (2, 0, 0)


@on_sqlite
def test_a_call_after_the_commit_that_calls_another_task_first(
    alias, app, add, in_shadow, outcomes
):
    class Twice(app.Task):
        def delay(self, *args):
            app.send_task("other", args)
            return super().delay(*args)

    twice = app.task(name="add", base=Twice, shared=False)(tasks.add)
    with transaction.atomic(using=alias):
        twice.delay_on_commit(1, 1)
    assert outcomes() == {"matched": 1}
    assert [each.task for each in ShadowResult.objects.all()] == ["add"]


@on_sqlite
def test_what_follows_a_task_that_is_run_at_once_is_tried_again(
    alias, add, sent, outcomes, in_shadow, monkeypatch
):
    """Celery asks the connection after which errors."""
    publish = Producer._publish

    def fail_once(*args):
        monkeypatch.setattr(Producer, "_publish", publish)
        raise add.app.connection_for_write().recoverable_connection_errors[0]

    monkeypatch.setattr(Producer, "_publish", fail_once)
    with transaction.atomic(using=alias):
        assert add.apply((1, 1), link=add.si(2, 2)).get() == 2
    assert sent() == [[2, 2]]
    assert outcomes() == {"early": 1}


@on_sqlite
def test_what_staging_would_send_too_leaves_no_record(alias, app, add, halves, in_shadow):
    @app.task(bind=True, shared=False)
    def again(self):
        with transaction.atomic(using=alias):
            raise self.retry(countdown=0)

    add.delay(1, 1)
    again.push_request(called_directly=False, id="1", retries=0)
    with pytest.raises(Retry):
        again.run()
    with app.connection_for_write() as connection, transaction.atomic(using=alias):
        add.apply_async((1, 1), connection=connection)
        add.apply_async_on_commit((1, 1), connection=connection)
    with transaction.atomic(using=alias):
        app.conf.task_always_eager = True
        add.delay(1, 1)
        add.delay_on_commit(1, 1)
    assert halves() == (0, 0, 0)


@on_sqlite
def test_an_explicit_stage_stages(alias, add, sent, halves, in_shadow):
    with transaction.atomic(using=alias):
        stage(add, (1, 1), using=alias)
    assert not sent()
    assert halves() == (0, 0, 1)


@pytest.mark.django_db(transaction=False)
@on_sqlite
def test_in_the_transaction_of_a_test_it_is_staged(alias, add, sent, halves, in_shadow):
    with transaction.atomic(using=alias):
        add.delay(1, 1)
        add.delay_on_commit(2, 2)
    assert not sent()
    assert halves() == (0, 0, 1)


@on_sqlite
def test_in_requests_and_from_coroutines(alias, add, client, settings, outcomes, monkeypatch):
    settings.OUTBOX = {**settings.OUTBOX, "TASK_MODES": {"*": "shadow"}}

    def view(request):
        add.delay(1, 1)
        add.delay_on_commit(2, 2)
        return HttpResponse()

    @transaction.non_atomic_requests
    async def later(request):
        await sync_to_async(transaction.atomic(view))(request)
        return HttpResponse()

    settings.ROOT_URLCONF = (path("now", view), path("later", later))
    monkeypatch.setitem(settings.DATABASES[alias], "ATOMIC_REQUESTS", True)
    client.get("/now")
    asyncio.run(sync_to_async(client.get)("/later"))
    assert outcomes(0) == {"early": 2, "matched": 2}


@on_sqlite
def test_the_command(alias, add, in_shadow, outcomes, capsys):
    call_command("outbox_shadow")
    assert capsys.readouterr().out == "No call in shadow mode was judged.\n"
    with transaction.atomic(using=alias):
        add.apply_async((1, 1), task_id="mine")
        add.delay_on_commit(2, 2)
    outcomes(0)
    call_command("outbox_shadow")
    first, last = capsys.readouterr().out.splitlines()
    assert first == "add: matched=1 early=1 never_sent=0 rolled_back=0 refused=0"
    assert re.fullmatch(r"    last early: 20.{23} mine", last)
    call_command("outbox_shadow", forget="b*")
    call_command("outbox_shadow", forget="a*")
    assert capsys.readouterr().out == "Forgotten tasks: 0.\nForgotten tasks: 1.\n"
    assert not ShadowResult.objects.exists()
    with rolled_back(alias):
        add.delay(3, 3)
    outcomes(0)
    call_command("outbox_shadow")
    assert capsys.readouterr().out.splitlines() == [
        "No call in shadow mode was judged.",
        "Calls that are not judged yet: 1. What was never sent, or sent for a rollback, is known "
        "after an hour.",
    ]


@on_sqlite
def test_what_it_costs_the_caller(alias, add, in_shadow, django_assert_num_queries):
    with transaction.atomic(using=alias), django_assert_num_queries(3):  # a savepoint, an INSERT
        add.delay(1, 1)
