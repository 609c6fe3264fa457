"""Calls that would fail silently are refused: a key without an order, and a wait without an end."""

from __future__ import annotations

import pytest
from celery import chain, chord, group
from celery.result import ResultSet
from django.db import transaction

from outbox_app import stage
from outbox_app.exceptions import NotAtomic, StillStaged
from outbox_app.testing import drain_inline
from tests.jobs.staging import tasks
from tests.jobs.staging.transactions import rolled_back
from tests.patience import patience

pytestmark = pytest.mark.django_db(transaction=True)
on_sqlite = pytest.mark.parametrize("alias", ["default"])
KEY = {"ordering_key": "k"}

SENT = {
    "delay": lambda add: add.apply_async((1, 1), **KEY),
    "group": lambda add: group(add.s(1, 1), add.s(2, 2)).apply_async(**KEY),
    "task of a group": lambda add: group(add.s(1, 1).set(**KEY)).delay(),
    "by name": lambda add: add.app.send_task("add", (1, 1), **KEY),
}


@pytest.mark.parametrize("send", SENT.values(), ids=SENT)
def test_a_key_outside_a_transaction_is_refused(send, alias, add, sent, staged, settings):
    with pytest.raises(NotAtomic, match=r"outside a transaction on .* Open transaction\.atomic"):
        send(add)
    assert not sent()
    assert not staged()

    settings.OUTBOX = {**settings.OUTBOX, "OUTSIDE": "stage"}
    send(add)
    assert staged()


@on_sqlite
def test_so_is_one_of_a_call_that_is_sent_by_hand(alias, app, add, sent):
    refused = pytest.raises(
        NotAtomic, match=r"with producer= or connection=.* Leave that argument out"
    )
    with transaction.atomic(using=alias), app.connection_for_write() as connection, refused:
        add.apply_async((1, 1), connection=connection, **KEY)
    assert not sent()


@pytest.mark.django_db
def test_the_transaction_of_a_test_gives_no_order(alias, add):
    with pytest.raises(NotAtomic, match=r"outside a transaction on .* Open transaction\.atomic"):
        add.apply_async((1, 1), **KEY)


@on_sqlite
def test_what_follows_a_task_is_sent_with_a_key(alias, app, add, sent):
    add.apply_async((1, 1), parent_id="a-task", **KEY)
    add.apply_async((2, 2), retries=1, **KEY)

    assert sent() == [[1, 1], [2, 2]]


WAITED = {
    "task": lambda add: add.delay(1, 1),
    "chain": lambda add: (add.s(1, 1) | add.s(2)).delay(),
    "group": lambda add: group(add.s(1, 1), add.s(2, 2)).delay(),
    "chord": lambda add: chord([add.s(1, 1), add.s(2, 2)], add.si(3, 3)).delay(),
    "staged by name": lambda add: stage("add", (1, 1), app=add.app),
}


@pytest.mark.parametrize("backend", ["cache+memory://", "redis"])
@pytest.mark.parametrize("send", WAITED.values(), ids=WAITED)
def test_waiting_inside_the_transaction_raises(send, backend, alias, make_app, redis_url, staged):
    app = make_app(result_backend=redis_url if backend == "redis" else backend)
    add = app.task(name="add", shared=False)(tasks.add)
    with transaction.atomic(using=alias):
        result = send(add)
        with transaction.atomic(using=alias), pytest.raises(StillStaged, match="Wait behind"):
            result.get(timeout=patience(30))

    assert staged(), "the transaction stays usable"


@pytest.mark.django_db
def test_so_does_waiting_in_a_test_whose_transaction_never_commits(alias, app, add):
    result = add.delay(1, 1)
    with pytest.raises(StillStaged, match="a TestCase never commits"):
        result.get(timeout=patience(30))

    drain_inline(using=alias)
    app.backend.store_result(result.id, 2, "SUCCESS")
    assert result.get(timeout=patience(30)) == 2


@on_sqlite
def test_a_long_chain_can_be_waited_for_in_a_transaction_of_another_purpose(alias, app, add):
    result = chain(*[add.si(1, 1)] * 1200).delay()
    app.backend.store_result(result.id, 2, "SUCCESS")
    with transaction.atomic(using=alias):
        add.delay(2, 2)
        assert result.get(timeout=patience(30)) == 2


def test_waiting_behind_it_waits(alias, app, add):
    with transaction.atomic(using=alias):
        result = add.delay(1, 1)
    app.backend.store_result(result.id, 2, "SUCCESS")
    assert result.get(timeout=patience(30)) == 2

    with transaction.atomic(using=alias):  # one of another purpose
        add.delay(2, 2)
        again = app.AsyncResult(result.id)
        assert again.get(timeout=patience(30)) == 2


@pytest.mark.parametrize("backend", ["cache+memory://", "redis"])
@on_sqlite
def test_so_does_a_set_of_results(backend, alias, make_app, redis_url):
    app = make_app(result_backend=redis_url if backend == "redis" else backend)
    add = app.task(name="add", shared=False)(tasks.add)
    with transaction.atomic(using=alias):
        results = ResultSet([add.delay(1, 1)], app=app)
        for join in (results.join, results.join_native):
            with pytest.raises(StillStaged, match="Wait behind"):
                join(timeout=patience(30))


def test_what_was_staged_in_a_transaction_of_its_own_can_be_waited_for(alias, app, add, settings):
    settings.OUTBOX = {**settings.OUTBOX, "OUTSIDE": "stage"}
    result = add.delay(1, 1)
    app.backend.store_result(result.id, 2, "SUCCESS")
    with transaction.atomic(using=alias):
        assert result.get(timeout=patience(30)) == 2


def test_a_transaction_that_was_rolled_back_is_over(alias, app, add):
    with rolled_back(alias):
        result = add.delay(1, 1)
    app.backend.store_result(result.id, 2, "SUCCESS")
    with transaction.atomic(using=alias):
        assert result.get(timeout=patience(30)) == 2
