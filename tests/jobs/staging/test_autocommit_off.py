"""With autocommit off, a transaction is open outside ``atomic()``: calls wait for its end."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from celery import group
from django.contrib.auth.models import Group
from django.db import connections, transaction

from outbox_app import cancel, idempotent, stage
from outbox_app.checks.aliases import check_autocommit
from outbox_app.events import publish
from outbox_app.events.models import Event
from outbox_app.exceptions import InboxError, NotAtomic
from outbox_app.models import InboxEntry
from tests.jobs.staging.test_rules import FORMS

pytestmark = pytest.mark.django_db(transaction=True)


@contextmanager
def without_autocommit(alias: str, *, commit: bool = False) -> Iterator[None]:
    transaction.set_autocommit(False, using=alias)
    try:
        yield
    finally:
        (transaction.commit if commit else transaction.rollback)(using=alias)
        transaction.set_autocommit(True, using=alias)


@pytest.mark.parametrize("send", FORMS.values(), ids=FORMS)
def test_a_call_is_refused(send, alias, add, sent, staged):
    with without_autocommit(alias, commit=True):
        Group.objects.using(alias).create(name="business")
        with pytest.raises(NotAtomic, match=f"autocommit off on '{alias}' and outside atomic"):
            send(add)

    assert not sent()
    assert not staged()
    assert Group.objects.using(alias).exists(), "the transaction stays usable"


def test_so_are_stage_and_publish(alias, add):
    with without_autocommit(alias):
        with pytest.raises(NotAtomic, match=r"stage\(\) was called with autocommit off"):
            stage(add, (1, 1), using=alias)
        with pytest.raises(NotAtomic, match=r"publish\(\) was called with autocommit off"):
            publish("order-1", "order.placed", using=alias)


@pytest.mark.parametrize("outside", ["send", "stage"])
def test_cancel_is_refused_before_it_has_deleted_anything(outside, alias, add, staged, settings):
    settings.OUTBOX = {**settings.OUTBOX, "OUTSIDE": outside}
    with transaction.atomic(using=alias):
        job = add.delay(1, 1)
    said = pytest.raises(NotAtomic, match=r"cancel\(\) was called with autocommit off")
    with without_autocommit(alias, commit=True), said:
        cancel(job.id, using=alias)
    assert staged() == [[1, 1]]


@pytest.mark.parametrize("alias", ["postgres"])
@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
def test_on_another_alias_it_is_refused_as_in_a_transaction_there(alias, add, sent):
    with without_autocommit(alias), pytest.raises(NotAtomic, match="staged on 'default'"):
        add.delay(1, 1)

    assert not sent()


def test_an_idempotent_task_does_not_run_where_nothing_would_commit_it(alias, app):
    ran = []

    @app.task(shared=False)
    @idempotent(using=alias)
    def once():
        ran.append(1)

    with without_autocommit(alias), pytest.raises(InboxError, match="Autocommit is off"):
        once.apply(throw=True)

    assert not ran
    assert not InboxEntry.objects.using(alias).exists()


@pytest.mark.parametrize("commit", [True, False])
def test_inside_atomic_and_where_the_setting_stages_it_goes_with_the_transaction(
    commit, alias, add, sent, staged, settings
):
    with without_autocommit(alias, commit=commit):
        Group.objects.using(alias).create(name="business")  # or SQLite's savepoint would commit
        with transaction.atomic(using=alias):
            add.delay(1, 1)
        settings.OUTBOX = {**settings.OUTBOX, "OUTSIDE": "stage"}
        group(add.s(2, 2), add.s(3, 3)).delay()
        publish("order-1", "order.placed", using=alias)

    assert staged() == ([[1, 1], [2, 2], [3, 3]] if commit else [])
    assert Event.objects.using(alias).count() == commit
    assert not sent()


def test_a_connection_that_was_never_opened_is_judged_by_its_setting(alias, add, sent, monkeypatch):
    connection = connections[alias]
    connection.close()
    monkeypatch.setitem(connection.settings_dict, "AUTOCOMMIT", False)
    with pytest.raises(NotAtomic, match="autocommit off"):
        group(add.s(1, 1), add.s(2, 2)).delay()

    assert connection.connection is None, "nothing was connected to ask"
    assert not sent()
    [error] = check_autocommit()
    assert (error.id, repr(alias) in error.msg) == ("outbox.E037", True)


def test_the_check_is_content_with_the_default(alias):
    assert check_autocommit() == []
