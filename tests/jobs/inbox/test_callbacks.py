"""Callbacks of ``on_commit`` in an idempotent task: none is lost without a word."""

from __future__ import annotations

import logging
import socket
import xmlrpc.client
from functools import partial, update_wrapper

import pytest
from celery import Celery
from celery.contrib.django.task import DjangoTask
from django.contrib.auth.models import Permission
from django.core.mail import send_mail
from django.db import IntegrityError, connections, transaction

from outbox_app import idempotent
from outbox_app.events import publish
from outbox_app.exceptions import CallbackFailed, UnsafeCallback
from outbox_app.jobs.staging import detector
from outbox_app.models import InboxEntry, StagedJob
from tests.celery_worker import received
from tests.conftest import _missing
from tests.faults.tools import on
from tests.jobs.inbox.worker import deliver, effect
from tests.jobs.staging.transactions import rolled_back

pytestmark = pytest.mark.django_db(transaction=True)

called = []


def call():
    called.append("call")


class Mailer:
    def send(self):
        pass

    def __call__(self):
        called.append("call")

    def __getattr__(self, name):
        raise RuntimeError(name)


def remote():
    """Return a method of a remote object: it answers for each attribute with another method."""
    return xmlrpc.client._Method(lambda name, args: called.append("call"), "ping")


@pytest.fixture(autouse=True)
def clean():
    called.clear()
    detector.late.clear()
    yield
    detector.late.clear()


@pytest.fixture
def mail(settings):
    """A mail to a server that is away, as a callback."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        settings.EMAIL_PORT = free.getsockname()[1]
    settings.EMAIL_HOST = "127.0.0.1"
    settings.EMAIL_BACKEND = "django.core.mail.backends.smtp.EmailBackend"
    return partial(send_mail, "Receipt", "Paid.", "shop@example.org", ["ann@example.org"])


@pytest.fixture
def detect(settings):
    def choose(mode):
        settings.OUTBOX = {**settings.OUTBOX, "DETECT": mode}

    return choose


@pytest.fixture
def unfinished(alias):
    return lambda: [
        text for text in InboxEntry.objects.using(alias).values_list("callbacks", flat=True)
    ]


def test_a_callback_that_fails_fails_the_job_for_good(
    alias, task, effects, noted, mail, unfinished, caplog
):
    @task
    @idempotent
    def pay():
        transaction.on_commit(mail, using=alias)
        transaction.on_commit(call, using=alias)
        return effect("paid")

    first, second = deliver(pay, "job"), deliver(pay, "job")

    assert (first.state, second.state) == ("FAILURE", "FAILURE")
    assert (effects(), noted(), called) == (["paid"], ["job"], ["call"])
    assert isinstance(first.value, CallbackFailed)
    assert isinstance(second.value, CallbackFailed)
    assert isinstance(first.value.__cause__, ConnectionRefusedError)
    for error in (first.value, second.value):
        assert f"{pay.name}[job] has committed its effects" in str(error)
        assert "django.core.mail.send_mail" in str(error)
        assert "ConnectionRefusedError" in str(error)
        assert "inbox.test_callbacks.call" not in str(error)
        assert "does not run again" in str(error)
        assert "delay()" in str(error)
    [record] = [each for each in caplog.records if each.name == "outbox_app.callbacks"]
    assert record.levelno == logging.ERROR
    assert "django.core.mail.send_mail" in record.callback
    assert record.of == f"{pay.name}[job]"
    assert "ConnectionRefusedError" in record.error


def test_a_retry_of_the_failure_does_not_succeed(alias, app, task, effects, mail):
    @task(autoretry_for=(Exception,), max_retries=1, retry_kwargs={"countdown": 0})
    @idempotent
    def pay():
        transaction.on_commit(mail, using=alias)
        return effect("paid")

    assert deliver(pay, "job").state == "RETRY"
    [message] = received(app)
    again = deliver(pay, "job", retries=message.headers["retries"])
    assert (again.state, type(again.value)) == ("FAILURE", CallbackFailed)
    assert effects() == ["paid"]


def test_a_second_delivery_waits_for_the_callbacks_of_the_first(alias, app, task, effects):
    seen = []

    @task
    @idempotent
    def pay():
        transaction.on_commit(lambda: seen.append(deliver(pay, "job").state), using=alias)
        return effect("paid")

    first = deliver(pay, "job")
    assert (first.state, seen) == ("SUCCESS", ["RETRY"])
    [message] = received(app)
    again = deliver(pay, "job", retries=message.headers["retries"])
    assert (again.state, again.value) == ("SUCCESS", first.value)
    assert effects() == ["paid"]


def test_what_ends_the_process_in_a_callback(alias, task, effects, monkeypatch):
    """Each delivery fails that comes when no worker can be running the callbacks any more."""
    monkeypatch.setattr("outbox_app.jobs.inbox.CALLBACK_SECONDS", 0)

    def leave():
        raise SystemExit

    @task
    @idempotent
    def pay():
        transaction.on_commit(leave, using=alias)
        transaction.on_commit(call, using=alias)
        return effect("paid")

    with pytest.raises(SystemExit):
        deliver(pay, "job")
    for _ in range(2):
        again = deliver(pay, "job")
        assert (again.state, type(again.value)) == ("FAILURE", CallbackFailed)
        assert "leave" in str(again.value)
        assert "inbox.test_callbacks.call" in str(again.value)
    assert (effects(), called) == (["paid"], [])


def test_callbacks_that_run_leave_nothing(alias, task, twice, effects, unfinished):
    @task
    @idempotent
    def pay():
        transaction.on_commit(call, using=alias)
        return effect("paid")

    first, second = twice(pay)
    assert (first.state, second.state, second.value) == ("SUCCESS", "SUCCESS", first.value)
    assert (effects(), called, unfinished()) == (["paid"], ["call"], [""])


def test_a_callback_that_may_fail_costs_nothing(alias, task, twice, mail, caplog):
    @task
    @idempotent
    def pay():
        transaction.on_commit(mail, using=alias, robust=True)
        return effect("paid")

    first, second = twice(pay)
    assert (first.state, second.state, second.value) == ("SUCCESS", "SUCCESS", first.value)
    assert "Error calling" in caplog.text  # Django's line


@pytest.mark.parametrize("hook", [Mailer(), remote()], ids=["raises", "answers"])
@pytest.mark.parametrize("robust", [False, True])
@pytest.mark.parametrize("alias", ["default"])
def test_an_object_that_answers_for_its_name_runs(alias, task, effects, unfinished, hook, robust):
    @task
    @idempotent
    def pay():
        transaction.on_commit(hook, using=alias, robust=robust)
        effect("paid")

    assert deliver(pay, "job").state == "SUCCESS"
    assert (effects(), called, unfinished()) == (["paid"], ["call"], [""])


def test_thousands_of_callbacks_that_fail(alias, task, unfinished, caplog):
    """What the row and the error say of them is short."""
    refuse = partial(int, "x" * 10_000)
    caplog.set_level(logging.CRITICAL, "outbox_app.callbacks")

    @task
    @idempotent
    def pay():
        for number in range(2000):
            transaction.on_commit(partial(refuse, 10 + number % 20), using=alias)
        transaction.on_commit(lambda: 1 / 0, using=alias)

    for _ in range(2):
        error = str(deliver(pay, "job").value)
        assert "has committed its effects" in error
        assert "ZeroDivisionError" in error
        assert len(error) < 15_000
    assert len(unfinished()[0]) < 15_000


def test_callbacks_in_a_transaction_of_the_caller_are_its_own(alias, task, effects, unfinished):
    """As in a TestCase, where callbacks run at its end or never."""

    @task
    @idempotent
    def pay():
        transaction.on_commit(call, using=alias)
        return effect("paid")

    with transaction.atomic(using=alias):
        assert deliver(pay, "job").state == "SUCCESS"
        assert called == []
    assert (effects(), called, unfinished()) == (["paid"], ["call"], [""])


def itself():
    """As ``functools.wraps`` leaves a function that a decorator returns as it is."""


update_wrapper(itself, itself)


def deferred(plain):
    """Callbacks, with what the detector calls them."""
    shop = plain.task(name="shop.pay", shared=False)(call)
    return {
        "function": (call, "tests.jobs.inbox.test_callbacks.call"),
        "partial": (partial(partial(called.append, 1), 2), "list.append"),
        "itself": (itself, "tests.jobs.inbox.test_callbacks.itself"),
        "lambda": (lambda: None, "deferred.<locals>.<lambda>"),
        "method": (Mailer.send.__get__(object()), "Mailer.send"),
        "object": (Mailer(), "Mailer"),
        "remote": (remote(), "leaves _Method to"),
        "delay": (partial(shop.delay, 1), "shop.pay.delay"),
        "signature": (shop.s(1).delay, "shop.pay.delay"),
        "publish": (partial(publish, "order-1", "paid"), "publish"),
    }


@pytest.mark.parametrize("form", deferred(Celery("any", set_as_current=False)))
@pytest.mark.parametrize("alias", ["default"])
def test_each_form_is_named_before_the_commit(alias, task, effects, noted, detect, form):
    callback, name = deferred(Celery("shop", set_as_current=False))[form]
    detect("raise")

    @task
    @idempotent
    def pay():
        effect("paid")
        with transaction.atomic(using=alias):
            transaction.on_commit(callback, using=alias)

    done = deliver(pay, "job")
    assert isinstance(done.value, UnsafeCallback)
    assert name in str(done.value)
    assert f"The task {pay.name}" in str(done.value)
    assert "delay() or stage()" in str(done.value)
    assert (effects(), noted()) == ([], [])


@pytest.mark.parametrize("alias", ["default"])
def test_delay_on_commit_of_plain_celery_is_named(alias, task, effects, detect):
    shop = Celery("shop", task_cls=DjangoTask, set_as_current=False)
    receipt = shop.task(name="shop.receipt", shared=False)(call)
    detect("raise")

    @task
    @idempotent
    def pay():
        receipt.delay_on_commit()

    with pytest.raises(UnsafeCallback, match=r"leaves shop\.receipt\.delay to on_commit"):
        raise deliver(pay, "job").value


def test_what_is_safe_is_not_found(alias, app, task, effects, noted, detect):
    detect("raise")
    receipt = task(name="receipt")(call)

    @task
    @idempotent
    def pay():
        effect("paid")
        receipt.delay()
        receipt.delay_on_commit()
        publish("order-1", "paid", using=alias)
        transaction.on_commit(call, using=alias, robust=True)
        with rolled_back(alias):
            transaction.on_commit(int, using=alias)

    assert deliver(pay, "job").state == "SUCCESS"
    assert not detector.late
    assert StagedJob.objects.using(alias).filter(task="receipt").count() == 2
    assert (effects(), called) == (["paid"], ["call"])


@on("default")
@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
def test_a_callback_of_another_alias_runs_in_the_task(alias, task, effects, noted, detect):
    """Before the commit, so its error rolls the task back."""
    if "postgres" not in connections:
        _missing("POSTGRES_URL")
    detect("raise")

    @task
    @idempotent
    def pay(fails):
        effect("paid")
        with transaction.atomic(using="postgres"):
            transaction.on_commit(call, using="postgres")
            if fails:
                transaction.on_commit(lambda: 1 / 0, using="postgres")

    assert isinstance(deliver(pay, "job", True).value, ZeroDivisionError)
    assert (effects(), noted()) == ([], [])
    assert deliver(pay, "job", False).state == "SUCCESS"
    assert (effects(), called, detector.late) == (["paid"], ["call", "call"], {})


def test_only_callbacks_of_the_task_are_found(alias, task, detect):
    detect("raise")

    @task
    @idempotent
    def pay():
        effect("paid")

    with transaction.atomic(using=alias):
        transaction.on_commit(call, using=alias)
        assert deliver(pay, "job").state == "SUCCESS"


def test_log_and_warn_break_nothing(alias, task, detect, caplog):
    @task
    @idempotent
    def pay():
        transaction.on_commit(call, using=alias)

    detect("log")
    for number in range(2):
        assert deliver(pay, f"job-{number}").state == "SUCCESS"
    [record] = [each for each in caplog.records if each.name == "outbox_app.detector"]
    assert (record.levelno, record.alias) == (logging.WARNING, alias)
    assert record.callback == "tests.jobs.inbox.test_callbacks.call"
    assert record.at == f"{__file__}:{call.__code__.co_firstlineno}"
    assert record.of == f"The task {pay.name}"
    detect("warn")
    with pytest.warns(RuntimeWarning, match=r"test_callbacks\.call .* is lost") as said:
        assert deliver(pay, "job-3").state == "SUCCESS"
    assert [(each.filename, each.lineno) for each in said] == [
        (__file__, call.__code__.co_firstlineno)
    ]
    assert called == ["call"] * 3
    assert list(detector.late.values()) == [3]


@on("default", "postgres")
def test_a_commit_that_fails_runs_no_callback(alias, task, effects, noted):
    """Nothing is committed, so the next delivery executes the task."""

    @task
    @idempotent
    def pay():
        transaction.on_commit(call, using=alias)
        effect("paid")
        Permission.objects.using(alias).create(content_type_id=0, codename="x", name="x")

    for _ in range(2):
        assert isinstance(deliver(pay, "job").value, IntegrityError)
    assert (effects(), noted(), called) == ([], [], [])
