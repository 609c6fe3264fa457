"""The detector finds calls that are sent inside a transaction, says where, and breaks none."""

from __future__ import annotations

import asyncio
import inspect
import logging
import os
import sys
from collections import Counter
from pathlib import Path

import pytest
from asgiref.sync import sync_to_async
from celery import Celery
from celery.app.task import Task
from django.db import transaction
from django.http import HttpResponse
from django.test import TestCase
from django.urls import path

from outbox_app import stage
from outbox_app.exceptions import SentInTransaction
from outbox_app.jobs.staging import detector
from tests import forking
from tests.jobs.staging import tasks
from tests.jobs.staging.test_rules import FORMS
from tests.jobs.staging.transactions import rolled_back

ROOT = Path(__file__).resolve().parents[3]
pytestmark = pytest.mark.django_db(transaction=True)
on_sqlite = pytest.mark.parametrize("alias", ["default"])


@pytest.fixture(autouse=True)
def detect(settings, monkeypatch):
    """``detect("raise")``; the end of the test removes the detector."""
    monkeypatch.setattr(Celery, "send_task", Celery.send_task)
    monkeypatch.setattr(Task, "apply_async", Task.apply_async)
    monkeypatch.setattr(detector, "_installed", False)
    monkeypatch.setattr(detector, "_chosen", None)
    detector.found.clear()

    def choose(mode):
        settings.OUTBOX = {**settings.OUTBOX, "DETECT": mode}
        detector.install()

    choose("log")
    yield choose
    detector.found.clear()


def place_of(function, after=0):
    """The file and the line of a function, or of one so many lines below."""
    return inspect.getsourcefile(function), inspect.getsourcelines(function)[1] + after


def places():
    return [(found.file, found.line) for found in detector.found]


@pytest.mark.parametrize("send", FORMS.values(), ids=FORMS)
@on_sqlite
def test_each_form_is_found_with_the_callers_line(send, alias, plain, plain_add, sent_by, caplog):
    with transaction.atomic(using=alias):
        send(plain_add)
    assert sent_by(plain)
    assert {found.task for found in detector.found} <= {"add", "celery.starmap"}
    file, line = place_of(send)
    assert set(places()) == {(file, line)}
    [record] = [each for each in caplog.records if "database" in each.__dict__]
    assert (record.levelno, record.database) == (logging.WARNING, alias)
    assert record.at == f"{file}:{line}"


def test_any_alias_savepoints_and_durable_blocks(alias, plain_add, settings):
    settings.OUTBOX = {**settings.OUTBOX, "DATABASE": "default"}
    with transaction.atomic(using=alias, durable=True):
        plain_add.delay(1, 1)
        with transaction.atomic(using=alias):
            plain_add.delay(1, 1)
        with rolled_back(alias):
            plain_add.delay(1, 1)
    transaction.set_autocommit(False, using=alias)
    plain_add.delay(1, 1)
    transaction.set_autocommit(True, using=alias)
    assert [found.alias for found in detector.found] == [alias] * 4


@on_sqlite
def test_a_place_is_logged_once_and_counted(alias, plain_add, caplog):
    with transaction.atomic(using=alias):
        for _ in range(3):
            plain_add.delay(1, 1)
        plain_add.delay(1, 1)
    assert len([each for each in caplog.records if each.name == detector.logger.name]) == 2
    assert sorted(detector.found.values()) == [1, 3]
    first, *rest = detector.report(detector.found)
    assert first == "add: 4"
    assert [line.rpartition(" ")[2] for line in rest] == ["3", "1"]


def test_places_with_as_many_calls_are_in_order():
    places = [("b", "y.py", 1), ("a", "x.py", 9), ("a", "x.py", 2), ("b", "y.py", 7)]
    found = Counter({detector.Finding(*place, "default"): 2 for place in places})
    found[detector.Finding("c", "z.py", 1, "default")] = 5
    lines = [line.partition(" (")[0].strip() for line in detector.report(found)]
    assert lines == ["c: 5", "z.py:1", "a: 4", "x.py:2", "x.py:9", "b: 4", "y.py:1", "y.py:7"]


@on_sqlite
def test_a_warning_names_the_callers_line(alias, detect, plain, plain_add, sent_by):
    def send():
        plain_add.delay(1, 1)

    detect("warn")
    with transaction.atomic(using=alias), pytest.warns(RuntimeWarning, match="add is sent") as said:
        send()
    assert [(each.filename, each.lineno) for each in said] == [place_of(send, 1)]
    assert sent_by(plain) == [[1, 1]]


@on_sqlite
@pytest.mark.parametrize("send", FORMS.values(), ids=FORMS)
def test_raise_sends_nothing(send, alias, detect, plain, plain_add, sent_by):
    detect("raise")
    with transaction.atomic(using=alias), pytest.raises(SentInTransaction, match="outbox='send'"):
        send(plain_add)
    assert not sent_by(plain)
    send(plain_add)
    assert sent_by(plain)


@on_sqlite
def test_what_is_safe_or_meant_is_not_found(alias, detect, plain, plain_add, add, app):
    detect("raise")

    @plain.task(bind=True, shared=False)
    def again(self):
        with transaction.atomic(using=alias):
            raise self.retry(countdown=0)

    ping = plain.task(name="ping", outbox="send", shared=False)(tasks.add)
    with transaction.atomic(using=alias):
        transaction.on_commit(lambda: plain_add.delay(1, 1), using=alias)
        ping.delay(1, 1)
        ping.map([1]).delay()
        add.delay(1, 1)
        with app.connection_for_write() as connection:
            add.apply_async((1, 1), connection=connection)
        stage(plain_add, (1, 1), using=alias)
    plain_add.delay(1, 1)
    again.push_request(called_directly=False, id="1", retries=0)
    with pytest.raises(Exception, match="Retry"):
        again.run()
    assert not detector.found


@pytest.mark.parametrize("kind", ["plain", "send"])
@on_sqlite
def test_the_transaction_of_a_test_case_does_not_count(
    kind, alias, detect, plain_add, add, settings
):
    send = (plain_add if kind == "plain" else add).delay

    class Case(TestCase):
        def runTest(self):
            send(1, 1)
            with self.captureOnCommitCallbacks(execute=True), transaction.atomic():
                transaction.on_commit(lambda: send(1, 1))
            with transaction.atomic(), pytest.raises(SentInTransaction):
                send(1, 1)

    detect("raise")
    settings.OUTBOX = {**settings.OUTBOX, "TASK_MODES": {"*": "send"}}
    result = Case().run()
    assert result.wasSuccessful(), result.failures + result.errors


@on_sqlite
def test_what_ours_sends_by_a_pattern_is_found(alias, add, settings):
    settings.OUTBOX = {**settings.OUTBOX, "TASK_MODES": {"add": "send"}}
    with transaction.atomic(using=alias):
        add.delay(1, 1)
    assert places()


@on_sqlite
def test_eager_tasks_are_found_unless_production_stages_them(alias, plain_add, add, app, plain):
    app.conf.task_always_eager = plain.conf.task_always_eager = True
    with transaction.atomic(using=alias):
        add.delay(1, 1)
        plain_add.apply((1, 1))
        assert not detector.found
        assert plain_add.delay(1, 2).get() == 3
    assert places()


@on_sqlite
def test_in_requests_and_from_coroutines(alias, plain_add, client, settings, monkeypatch):
    @transaction.atomic(using=alias)
    def work():
        plain_add.delay(1, 1)

    def view(request):
        plain_add.delay(1, 1)
        return HttpResponse()

    async def later(request):
        await sync_to_async(work)()
        return HttpResponse()

    later = transaction.non_atomic_requests(later)
    settings.ROOT_URLCONF = (path("now", view), path("later", later))
    monkeypatch.setitem(settings.DATABASES[alias], "ATOMIC_REQUESTS", True)
    client.get("/now")
    asyncio.run(sync_to_async(client.get)("/later"))
    assert places() == [place_of(view, 1), place_of(work.__wrapped__, 2)]


@on_sqlite
def test_what_instruments_celery_is_not_the_caller(alias, plain_add):
    between = {"__name__": "sentry_sdk.integrations.celery"}
    exec("def call(send):\n    send(1, 1)", between)

    def send():
        between["call"](plain_add.delay)

    with transaction.atomic(using=alias):
        send()
    assert places() == [place_of(send, 1)]


@on_sqlite
def test_a_detector_that_fails_breaks_no_call(
    alias, plain, plain_add, sent_by, monkeypatch, caplog
):
    monkeypatch.setattr(detector, "_caller", lambda: None)
    with transaction.atomic(using=alias):
        plain_add.delay(1, 1)
    assert sent_by(plain) == [[1, 1]]
    assert "Detector failed task=add" in caplog.text


def test_pytest_reports_what_its_workers_found(tmp_path):
    (tmp_path / "project.py").write_text(
        "SECRET_KEY = 'x'\nINSTALLED_APPS = ['outbox_app']\nUSE_TZ = True\n"
        "DATABASES = {'default': {'ENGINE': 'django.db.backends.sqlite3', 'NAME': ':memory:'}}\n"
    )
    (tmp_path / "test_shop.py").write_text(
        "import pytest\nfrom celery import Celery\nfrom django.db import transaction\n"
        "@pytest.fixture(scope='session')\ndef django_db_setup(): ...\n"  # no tables are needed
        "app = Celery('shop', broker='memory://')\n"
        "@app.task\ndef pay(): ...\n"
        "def test_pay(db):\n    with transaction.atomic():\n        pay.delay()\n"
        "def test_twice(db):\n    for _ in range(2):\n        test_pay(db)\n"
        "from outbox_app.jobs.staging.detector import watching_callbacks\n"
        "def test_callback(db):\n"
        "    with transaction.atomic(), watching_callbacks('The task pay', using='default'):\n"
        "        transaction.on_commit(test_pay)\n"
    )
    command = [sys.executable, "-m", "pytest", "--ds=project", "-p", "no:randomly", "-n1"]
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{ROOT}", "DJANGO_SETTINGS_MODULE": ""}
    done = forking.run(
        [*command, "--outbox-detect=log", "test_shop.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "= tasks sent inside a transaction =" in done.stdout
    assert "test_shop.pay: 3\n    test_shop.py:11 (default): 3\n" in done.stdout
    assert "= on_commit callbacks that are lost if they fail =" in done.stdout
    assert "The task pay: test_shop.test_pay: 1\n    test_shop.py:9 (default)\n" in done.stdout
