"""Tasks by name: they are found where the app's workers find them, else staged by their names."""

from __future__ import annotations

import logging
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest
from django.test.utils import override_system_checks

from outbox_app.jobs.staging import sending
from outbox_app.jobs.staging.sending import task_named
from tests.mixin import gate
from tests.patience import patience


@pytest.fixture
def module(tmp_path, monkeypatch):
    """``module(code)``: the name of a new module, which is not imported yet."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(code):
        name = f"late_{uuid4().hex}"
        (tmp_path / f"{name}.py").write_text(code)
        return name

    return write


def test_task_modules_are_imported_at_the_first_unknown_name(make_app, module):
    name = module("from celery import shared_task\n@shared_task(time_limit=7)\ndef late(): ...")
    app = make_app(imports=[name])
    assert task_named(f"{name}.late", app).time_limit == 7


def test_system_checks_are_not_run_there(make_app, module, monkeypatch):
    """From Django 6.1 on they connect to databases: one that is away kept the tasks unknown."""
    monkeypatch.delenv("CELERY_SKIP_CHECKS", raising=False)
    asked = []

    def check(**kwargs):
        asked.append(kwargs)
        return []

    name = module("from celery import shared_task\n@shared_task\ndef late(): ...")
    with override_system_checks([check]):
        task_named(f"{name}.late", make_app(imports=[name]))
    assert asked == []
    assert not os.environ["CELERY_SKIP_CHECKS"]


def test_unknown_task_stays_a_name(make_app):
    assert task_named("elsewhere.task", make_app()) == "elsewhere.task"


def test_module_that_fails_is_said_once(make_app, module, caplog):
    app = make_app(imports=[module("import worker_only")])
    with caplog.at_level(logging.WARNING, "outbox_app.staging"):
        assert task_named("a.task", app) == "a.task"
        assert task_named("a.task", app) == "a.task"
    [record] = caplog.records
    assert "No module named 'worker_only'" in record.getMessage()


def test_second_thread_waits_for_the_modules(make_app, module, monkeypatch):
    """Without the lock it would find no task, and stage by name."""

    class Lock:
        def __init__(self):
            self.lock = threading.RLock()
            self.somebody_waits = threading.Event()

        def __enter__(self):
            if not self.lock.acquire(blocking=False):
                self.somebody_waits.set()
                self.lock.acquire()

        def __exit__(self, *error):
            self.lock.release()

    lock = Lock()
    monkeypatch.setattr(sending, "_loading", lock)
    name = module(
        "from celery import shared_task\n"
        "from tests.mixin import gate\n"
        "gate.entered.set()\n"
        "assert gate.opened.wait(30)\n"
        "@shared_task\n"
        "def late(): ...\n"
    )
    app = make_app(imports=[name])
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(task_named, f"{name}.late", app)
        assert gate.entered.wait(patience(30))
        second = pool.submit(task_named, f"{name}.late", app)
        assert lock.somebody_waits.wait(patience(30))
        gate.opened.set()
        assert (
            first.result(patience(30)) is second.result(patience(30)) is app.tasks[f"{name}.late"]
        )
