"""Two projects with two databases, as processes, over real sockets. Each is killed anywhere."""

from __future__ import annotations

import glob
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
from django.contrib.auth.models import Group
from django.db import transaction

from outbox_app.door import client
from outbox_app.prepared import (
    NewPrepared,
    confirm,
    fence,
    prepare,
    prepared,
    prepared_many,
    remote,
)
from outbox_app.prepared.exceptions import KeeperUnavailable
from outbox_app.prepared.models import PreparedEvent
from outbox_app.prepared.request import time_ordered_id
from tests import forking
from tests.faults.test_wrong_clock import LIBRARY
from tests.fixtures.door import ROOT
from tests.patience import eventually, patience
from tests.servers import processes

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"]),
    pytest.mark.parametrize("alias", [pytest.param("postgres", id="postgres")], indirect=True),
]


@pytest.fixture
def pay(variables: Any, sender: str) -> Any:
    """``pay(*dies)``: processes of billing pay, and die at these points; returns their output."""

    def run(*dies: str, **more: str) -> str:
        command = [sys.executable, "-m", "tests.door.payer", sender]
        command += [word for each in dies for word in (str(time_ordered_id()), each)]
        env = {**variables("billing", sender), **more}
        done = forking.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
        assert more or done.returncode == 0, done.stderr
        return done.stderr

    return run


@pytest.fixture
def check_back(variables: Any, alias: str) -> Any:
    """``check_back()``: run a check-back of the shop in a process, until no event is due."""

    def run(**more: str) -> int:
        command = [sys.executable, "manage.py", "run_prepared", "--once"]
        env = {**variables("shop", alias), **more}
        return forking.run(command, cwd=ROOT, env=env, capture_output=True).returncode

    return run


def test_a_sender_is_killed_anywhere(
    alias: str, sender: str, serve: Any, pay: Any, check_back: Any, states: Any, in_log: Any
) -> None:
    serve("shop", alias)
    serve("billing", sender)
    pay("never", "prepared", "fenced", "committed")
    eventually(lambda: Group.objects.using(sender).count() == 2)
    assert states() == ["confirmed", "prepared", "prepared", "prepared"]
    assert check_back() == 0
    assert states() == ["confirmed", "cancelled", "cancelled", "confirmed"]
    assert in_log() == [("order-17", "order.paid", {"total": 30})] * 2


def test_a_sender_that_is_away_keeps_its_events(
    alias: str,
    sender: str,
    serve: Any,
    both: None,
    pay: Any,
    check_back: Any,
    ask: Any,
    states: Any,
) -> None:
    serve("shop", alias)
    pay("committed")
    assert check_back() == 1
    [row] = PreparedEvent.objects.using(alias)
    assert (row.state, row.answered, row.unreachable > 0) == ("prepared", 0, True)
    PreparedEvent.objects.using(alias).update(next_check_at=row.prepared_at)
    serve("billing", sender)
    assert not ask().trouble
    assert states() == ["confirmed"]


def test_servers_that_are_stopped_are_silent(
    alias: str,
    sender: str,
    serve: Any,
    both: None,
    ask: Any,
    states: Any,
    in_log: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGSTOP for longer than a call takes: what was sent to them arrives when they go on."""
    shop, billing = serve("shop", alias), serve("billing", sender)
    event = prepare("order-17", "order.paid", using=sender, to="shop", immune=0)
    with transaction.atomic(using=sender):
        fence(event)
    with monkeypatch.context() as short:
        # Longer than a connection is kept, which gunicorn closes with the request that waits in it.
        short.setattr(remote, "SECONDS", patience(1.2))
        short.setitem(client.call.__kwdefaults__ or {}, "seconds", patience(1.2))
        with stopped(billing):
            assert "billing" in ask().trouble
        [row] = PreparedEvent.objects.using(alias)
        assert (row.state, row.answered, row.unreachable) == ("prepared", 0, 1)
        with stopped(shop):
            with pytest.raises(KeeperUnavailable):
                confirm(event)
            with pytest.raises(KeeperUnavailable):
                prepare("order-18", "order.paid", using=sender, to="shop", immune=0)
    eventually(lambda: states() == ["confirmed", "prepared"])
    ask()
    assert (states(), len(in_log())) == (["confirmed", "cancelled"], 1)


@contextmanager
def stopped(server: Any) -> Iterator[None]:
    processes.stop_tree(server.pid)
    try:
        yield
    finally:
        processes.continue_tree(server.pid)


def test_clocks_that_are_two_hours_wrong(
    alias: str,
    sender: str,
    serve: Any,
    both: None,
    pay: Any,
    check_back: Any,
    ask: Any,
    states: Any,
    tmp_path: Path,
) -> None:
    """On either side: calls are refused, the other says by how much, nothing is decided."""
    [library] = glob.glob(LIBRARY) or [pytest.skip("no libfaketime")]
    clock = {"LD_PRELOAD": library, "FAKETIME_DONT_FAKE_MONOTONIC": "1"}
    serve("shop", alias)
    serve("billing", sender)
    event = prepare("order-17", "order.paid", using=sender, to="shop", immune=0)
    with transaction.atomic(using=sender):
        fence(event)
    assert "KeeperUnavailable" in pay("never", FAKETIME="-2h", **clock)
    assert check_back(FAKETIME="+2h", **clock) == 1
    [row] = PreparedEvent.objects.using(alias)
    assert (row.state, row.answered, row.unreachable) == ("prepared", 0, 1)
    assert "401" in row.last_answer
    assert "its clock is off by -7" in row.last_answer
    for project, key, hours in (("shop", "billing-1", -2), ("billing", "shop-1", 2)):
        said = (tmp_path / f"{project}.log").read_text()
        [seconds] = re.findall(rf"Clock wrong, or message old key={key} seconds=(-?\d+)", said)
        assert round(int(seconds) / 3600) == hours
    assert not Group.objects.using(sender).exists()
    PreparedEvent.objects.using(alias).update(next_check_at=row.prepared_at)
    ask()
    assert states() == ["confirmed"]


@pytest.mark.parametrize("dies", ["prepared", "decided", "decided_committed"])
def test_a_keeper_is_killed_anywhere(
    alias: str, sender: str, serve: Any, both: None, dies: str, states: Any, in_log: Any
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
    assert len(in_log()) == 1


def test_many_events_of_one_transaction(
    alias: str, sender: str, serve: Any, both: None, told: Any, in_log: Any
) -> None:
    serve("shop", alias)
    new = [NewPrepared(f"order-{n}", "order.paid", {"n": n}) for n in range(600)]
    with prepared_many(new, using=sender, to="shop"):
        pass
    told()
    assert in_log() == [(f"order-{n}", "order.paid", {"n": n}) for n in range(600)]
