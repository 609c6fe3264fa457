"""SIGTERM and SIGINT end a foreground process at any moment. A called command leaves nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from django.core.management import call_command
from django.db import connections, transaction

from outbox_app.management.base import OutboxCommand
from outbox_app.models import Incident
from outbox_app.process.foreground import stop_on_signals
from outbox_app.process.waiting import StopFlag
from tests import forking
from tests.faults.tools import on
from tests.patience import eventually, patience

ROOT = Path(__file__).parents[2]


@pytest.mark.timeout(20)
def test_a_signal_at_any_moment_of_a_wait() -> None:
    """The handler must not need a lock that the wait may hold: nothing would end that."""

    def trace(frame: Any, event: str, argument: Any) -> Any:
        signal.raise_signal(signal.SIGTERM)
        return trace

    before, stopped = sys.gettrace(), StopFlag()
    with OutboxCommand().handling_signals():
        stop_on_signals(stopped.set)
        sys.settrace(trace)
        try:
            stopped.wait(0.01)
        finally:
            sys.settrace(before)
        assert stopped.is_set()


def test_after_a_block_a_signal_interrupts_on_the_command_line_too() -> None:
    """Spark is stopped after an archiver's block: a second Ctrl-C has to end the wait for it."""
    command, before = OutboxCommand(), signal.getsignal(signal.SIGINT)
    command._called_from_command_line = True  # type: ignore[attr-defined]
    with command.handling_signals():
        stop_on_signals(lambda: None)
        assert signal.getsignal(signal.SIGINT) is not before
    assert signal.getsignal(signal.SIGINT) is before


LATE = """
import os, signal
import django
django.setup()
from outbox_app.management.base import OutboxCommand
from outbox_app.process.foreground import stop_on_signals

class Late:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGTERM)

def work(using):
    stop_on_signals(lambda: None)
    return 0

late, command = Late(), OutboxCommand()
command._called_from_command_line = True
command.run(work, database="default")
"""


def test_a_second_signal_while_python_ends_changes_nothing() -> None:
    """As from a terminal and from a process manager, which passes it on."""
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"}
    assert subprocess.run([sys.executable, "-c", LATE], cwd=ROOT, env=environment).returncode == 0


SHORT_OF_PROCESSES = """
import multiprocessing.context, time
import django
django.setup()
from outbox_app.process.foreground import run_workers, stop_on_signals

fork, asked = multiprocessing.context.ForkProcess.start, []

def start(process):
    asked.append(process)
    if len(asked) in {refused}:
        raise BlockingIOError(11, "Resource temporarily unavailable")
    fork(process)

def work(parent):
    stopped = []
    stop_on_signals(lambda: stopped.append(True))
    print("begun", flush=True)
    while not stopped:
        time.sleep(0.05)
    print("ended", flush=True)
    return 0

multiprocessing.context.ForkProcess.start = start
raise SystemExit(run_workers(work, count=2, restart=True))
"""


@pytest.mark.parametrize("refused", [(1,), (2,), (2, 3)], ids=str)
def test_where_a_process_cannot_be_forked(refused: tuple[int, ...], tmp_path: Path) -> None:
    """Another one works, it is tried again, and a stop reaches all of them."""
    script, log = SHORT_OF_PROCESSES.format(refused=refused), tmp_path / "log"
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"}
    with log.open("w") as output:
        parent = forking.Popen(
            [sys.executable, "-c", script], cwd=ROOT, env=environment, stdout=output, stderr=output
        )
    try:
        eventually(lambda: log.read_text().count("begun") == 2, "both work")
        assert "cannot be started" in log.read_text()
        parent.send_signal(signal.SIGTERM)
        assert parent.wait(patience()) == 0
    finally:
        parent.kill()
    assert log.read_text().count("ended") == 2


def called(command: str, alias: str) -> None:
    once = {"once": True} if command != "outbox_status" else {}
    with contextlib.suppress(SystemExit):  # it has found a problem
        call_command(command, database=alias, **once)


COMMANDS = pytest.mark.parametrize("command", ["outbox_status", "run_prepared"])


@on("postgres", "mariadb")
@COMMANDS
@pytest.mark.django_db(transaction=True)
def test_a_called_command_leaves_no_timeouts(
    alias: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On MariaDB slow statements of a Celery worker would lose their connections."""
    connections[alias].close()
    options, seen = connections.settings[alias]["OPTIONS"], []
    before, look = dict(options), connections[alias].introspection.table_names

    def meanwhile() -> list[str]:
        seen.append(dict(options))
        return look()

    monkeypatch.setattr(connections[alias].introspection, "table_names", meanwhile)
    called(command, alias)
    assert seen
    assert all(each == before for each in [options, *seen])  # those of other threads
    assert connections[alias].settings_dict is connections.settings[alias]
    assert connections[alias].connection is None


@on("postgres")
@COMMANDS
@pytest.mark.usefixtures("pool_of_one")
@pytest.mark.django_db(transaction=True)
def test_a_called_command_leaves_the_pool_whole(alias: str, command: str) -> None:
    """It ended with AttributeError, as its connection was given to the pool, or took one away."""
    for _ in range(2):
        called(command, alias)
        connections[alias].ensure_connection()


@on("postgres", "mariadb")
@pytest.mark.django_db(transaction=True)
def test_a_called_command_keeps_an_open_transaction(alias: str) -> None:
    """Where autocommit is off for a while: its writes were gone, and the commit raised nothing."""
    transaction.set_autocommit(False, using=alias)
    try:
        Incident.objects.using(alias).create(kind="requeue", first_id=1, last_id=1)
        called("outbox_status", alias)
        transaction.commit(using=alias)
    finally:
        transaction.set_autocommit(True, using=alias)
    assert Incident.objects.using(alias).exists()


def test_where_no_signal_comes_none_is_listened_to() -> None:
    """As in the thread of a scheduler, which calls ``drain_outbox --once``."""
    before = signal.getsignal(signal.SIGTERM)
    with ThreadPoolExecutor(1) as pool:
        pool.submit(stop_on_signals, lambda: None).result()
    assert signal.getsignal(signal.SIGTERM) == before
