"""Two projects with two databases, as processes, over real sockets; either is killed anywhere."""

from __future__ import annotations

import subprocess
import sys
from contextlib import nullcontext
from typing import Any

import pytest
from django.contrib.auth.models import Group

from outbox_app.exceptions import KeeperUnavailable
from outbox_app.models import PreparedEvent
from outbox_app.prepared import NewPrepared, confirm, prepared, prepared_many
from outbox_app.prepared.request import time_ordered_id
from tests.patience import eventually

from .conftest import ROOT

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"]),
    pytest.mark.parametrize("alias", [pytest.param("postgres", id="postgres")], indirect=True),
]


@pytest.fixture
def pay(variables: Any, sender: str) -> Any:
    """``pay(dies)``: a process of billing pays, and dies at that place; returns the event's id."""

    def run(dies: str) -> str:
        id = str(time_ordered_id())
        command = [sys.executable, "-m", "tests.door.payer", sender, id, dies]
        done = subprocess.run(
            command, cwd=ROOT, env=variables("billing", sender), capture_output=True, text=True
        )
        assert done.returncode == (0 if dies == "never" else -9), done.stderr
        return id

    return run


@pytest.fixture
def check_back(variables: Any, alias: str) -> Any:
    """``check_back()``: a process of the shop asks until nothing is due."""

    def run() -> int:
        command = [sys.executable, "manage.py", "run_prepared", "--once"]
        done = subprocess.run(
            command, cwd=ROOT, env=variables("shop", alias), capture_output=True, text=True
        )
        return done.returncode

    return run


def test_a_sender_is_killed_anywhere(
    alias: str, sender: str, serve: Any, pay: Any, check_back: Any, states: Any, published: Any
) -> None:
    serve("shop", alias)
    serve("billing", sender)
    for dies in ("never", "prepared", "fenced", "committed"):
        pay(dies)
    eventually(lambda: Group.objects.using(sender).count() == 2)
    assert states() == ["confirmed", "prepared", "prepared", "prepared"]
    assert check_back() == 0
    assert states() == ["confirmed", "cancelled", "cancelled", "confirmed"]
    assert published() == [("order-17", "order.paid", {"total": 30})] * 2


def test_a_sender_that_is_away_keeps_its_events(
    alias: str, sender: str, serve: Any, pay: Any, check_back: Any, states: Any
) -> None:
    serve("shop", alias)
    pay("committed")
    assert check_back() == 1
    [row] = PreparedEvent.objects.using(alias)
    assert (row.state, row.answered, row.unreachable > 0) == ("prepared", 0, True)
    PreparedEvent.objects.using(alias).update(next_check_at=row.prepared_at)
    serve("billing", sender)
    assert check_back() == 0
    assert states() == ["confirmed"]


@pytest.mark.parametrize("dies", ["prepared", "decided", "decided_committed"])
def test_a_keeper_is_killed_anywhere(
    alias: str, sender: str, serve: Any, both: None, dies: str, states: Any, published: Any
) -> None:
    """Its worker dies where the failpoint is; what it had committed is there."""
    keeper = serve("shop", alias, OUTBOX_FAILPOINT=f"{dies}=kill@1")
    begun = []
    # What fails after the commit raises nothing: the check-back finds out.
    unavailable = pytest.raises(KeeperUnavailable) if dies == "prepared" else nullcontext()
    paid = prepared("order-17", "order.paid", using=sender, to="shop", wait=True)
    with unavailable, paid as event:
        begun.append(event)
        Group.objects.using(sender).create(name="paid")
    keeper.kill()
    assert Group.objects.using(sender).count() == len(begun)
    assert states() == ["confirmed" if dies == "decided_committed" else "prepared"]
    serve("shop", alias)
    if not begun:  # the answer to prepare was lost: the same id is the same event
        [row] = PreparedEvent.objects.using(alias)
        with prepared(
            "order-17", "order.paid", using=sender, to="shop", wait=True, event_id=row.event_id
        ):
            pass
    else:
        confirm(*begun)
    assert states() == ["confirmed"]
    assert len(published()) == 1


def test_many_events_of_one_transaction(
    alias: str, sender: str, serve: Any, both: None, told: Any, published: Any
) -> None:
    serve("shop", alias)
    new = [NewPrepared(f"order-{n}", "order.paid", {"n": n}) for n in range(600)]
    with prepared_many(new, using=sender, to="shop"):
        pass
    told()
    assert published() == [(f"order-{n}", "order.paid", {"n": n}) for n in range(600)]
