"""One-way calls resume when the database is back, even if their thread is busy."""

from __future__ import annotations

import logging
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import django.db
import pytest
from celery.concurrency.prefork import process_destructor
from django.db import connections

from outbox_app.models import Process
from outbox_app.process import background
from outbox_app.process.background import Background
from tests.faults.tools import on
from tests.patience import eventually, patience
from tests.servers.mysql import MARIADB

KILL = {
    "postgres": "SELECT pg_terminate_backend(pg_backend_pid())",
    MARIADB: "KILL CONNECTION_ID()",
}


@on("postgres", "mariadb")
@pytest.mark.django_db(transaction=True)
def test_a_connection_that_was_cut_is_opened_anew(alias: str) -> None:
    calls = Background("cut", threads=1, longest=10, together=1, at_exit=0)
    answered: list[bool] = []

    def ask(items: list[bool]) -> None:
        try:
            if items[0]:
                connections[alias].cursor().execute(KILL[alias])
            answered.append(not Process.objects.using(alias).exists())
        except django.db.Error:
            answered.append(False)

    for is_cut in (False, True, False, False):
        calls.send(ask, [is_cut])
    assert calls.drain(patience(20))
    assert answered == [True, False, True, True]
    eventually(lambda: not calls.threads, "it is idle, and has closed its connection")


def test_calls_that_no_thread_makes_are_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    calls = Background("none", threads=1, longest=10, together=1, at_exit=0)
    with monkeypatch.context() as crowded:
        crowded.setattr(threading.Thread, "start", start)
        calls.send(print, ["never"])
        assert calls.waiting.qsize() == 1
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=lambda _: pytest.fail("it waits"))
    monkeypatch.setattr(background, "time", clock)
    assert not calls.drain(patience(20))


def test_no_other_sender_waits_for_the_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A handler that sends mail by Celery comes back here itself, in shadow mode."""
    calls = Background("late", threads=1, longest=10, together=1, at_exit=0)
    start, refused, waits, made = threading.Thread.start, [], [], []

    def refuse_first(self: threading.Thread) -> None:
        if self.name == calls.name and not refused:
            refused.append(self)
            raise RuntimeError("can't start new thread")
        start(self)

    def emit(record: logging.LogRecord) -> None:
        sender = threading.Thread(target=calls.send, args=(made.extend, [2]), daemon=True)
        sender.start()
        sender.join(patience(2))
        waits.append(sender.is_alive())

    monkeypatch.setattr(threading.Thread, "start", refuse_first)
    monkeypatch.setattr(caplog.handler, "emit", emit)
    calls.send(made.extend, [1])
    assert calls.drain(patience(20))
    assert waits == [False]
    assert made == [1, 2]


def test_lost_calls_are_logged_once_until_there_is_room(caplog: pytest.LogCaptureFixture) -> None:
    """A peer that hangs for an hour must not fill the log with a line for each request."""
    caplog.set_level("INFO", logger="outbox_app")
    calls = Background("stuck", threads=1, longest=1, together=1, at_exit=0)
    begun, go = threading.Event(), threading.Event()

    def hang(items: list[int]) -> None:
        begun.set()
        go.wait(patience(60))

    calls.send(hang, [1])
    assert begun.wait(patience(20))
    for n in range(5):
        calls.send(hang, [n])
    assert caplog.text.count("1 calls wait, so others are lost") == 1
    go.set()
    assert calls.drain(patience(20))
    calls.send(hang, [6])
    assert "Available again what=stuck after_failures=4" in caplog.text


def under_multiprocessing(work: Callable[[], object]) -> None:
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    child.join(patience(20))
    assert child.exitcode == 0


def under_celery(work: Callable[[], object]) -> None:
    if not (child := os.fork()):
        work()
        process_destructor(os.getpid(), 0)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("run", [under_multiprocessing, under_celery])
def test_a_process_that_runs_no_exit_handlers_makes_its_calls(
    run: Callable[[Callable[[], object]], None], tmp_path: Path
) -> None:
    """As a task's notes of shadow mode, in a process of the prefork pool that is replaced."""
    calls = Background("forked", threads=1, longest=10, together=1, at_exit=patience(20))

    def call(paths: list[Path]) -> None:
        time.sleep(0.1)
        paths[0].touch()

    run(lambda: [calls.send(call, [tmp_path / name]) for name in "ab"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "b"]


@pytest.mark.parametrize("run", [under_multiprocessing, under_celery])
def test_a_process_that_imports_the_app_itself(
    run: Callable[[Callable[[], object]], None], tmp_path: Path
) -> None:
    """As one of a fork server does, the default since Python 3.14. It runs no exit handlers."""
    run(lambda: background.at_end((tmp_path / "ended").touch))
    assert (tmp_path / "ended").exists()


@pytest.mark.parametrize("error", [ZeroDivisionError, SystemExit])
def test_a_call_that_raises_costs_no_other_call(
    caplog: pytest.LogCaptureFixture, error: type[BaseException]
) -> None:
    """Others are combined with it, and wait behind it; the end of the process waits for none."""
    calls = Background("raising", threads=1, longest=10, together=10, at_exit=0)
    begun, go, made = threading.Event(), threading.Event(), list[int]()

    def hold(items: list[int]) -> None:
        begun.set()
        assert go.wait(patience(60))

    def fail(items: list[int]) -> None:
        raise error

    calls.send(hold, [0])
    assert begun.wait(patience(20))
    [thread] = calls.threads
    for call in (fail, made.extend):
        calls.send(call, [1])
    go.set()
    assert calls.drain(patience(20))
    assert made == [1]
    assert calls.threads == {thread}
    assert f"Background call failed what=raising error={error.__name__}\n" in caplog.text
