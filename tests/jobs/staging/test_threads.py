"""Threads share an app and its result backend: one is paused at any line while another runs."""

from __future__ import annotations

import sys
from contextlib import contextmanager

import pytest
from celery import Celery

from outbox_app.jobs.staging.results import wrap_backend
from outbox_app.jobs.staging.sending import StagingMixin, make_stageable

LINES = range(1, 9)


class Backend:
    """What a result backend of Celery has that is wrapped."""

    def __init__(self):
        self.subscribed = set()

    def on_task_call(self, producer, task_id): ...

    def on_chord_part_return(self, request, state, result): ...

    def add_pending_result(self, result, weak=False):
        self.subscribed.add(result)

    def wait_for_pending(self, result): ...


class Result:
    """What a weak reference can be had of."""


@contextmanager
def at_line(number, function, call):
    """Make a call, as another thread does, before that line of the function, or else behind it."""
    left, tracer = [number], sys.gettrace()

    def at_each_line(frame, event, argument):
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                call()
        return at_each_line

    sys.settrace(lambda frame, *_: at_each_line if frame.f_code is function.__code__ else None)
    try:
        yield
    finally:
        sys.settrace(tracer)
    if left[0] > 0:
        call()


@pytest.mark.parametrize("line", LINES)
def test_two_make_one_app_stageable(line):
    app = Celery("plain", set_as_current=False)
    with at_line(line, make_stageable, lambda: make_stageable(app)):
        make_stageable(app)
    assert type(app).__mro__.count(StagingMixin) == 1


@pytest.mark.parametrize("line", range(1, 30))
def test_two_wrap_one_backend(line):
    """As at the first call of each, where threads share it (result_backend_thread_safe)."""
    backend, result, now_staging = Backend(), Result(), [True]

    def wrap():
        return wrap_backend(backend, lambda: now_staging[0])

    with at_line(line, wrap_backend, lambda: wrap().add_pending_result(result)):
        wrap()
    now_staging[0] = False
    backend.wait_for_pending(result)
    assert backend.subscribed == {result}


@pytest.mark.parametrize("line", LINES)
def test_one_waits_while_another_stages(line):
    """What it has staged is subscribed to then, or at the next wait."""
    backend, now_staging = Backend(), [True]
    wrap_backend(backend, lambda: now_staging[0])
    first, second = Result(), Result()
    backend.add_pending_result(first)
    now_staging[0] = False

    def stage_another():
        now_staging[0] = True
        backend.add_pending_result(second)
        now_staging[0] = False

    with at_line(line, backend.wait_for_pending, stage_another):
        backend.wait_for_pending(first)
    backend.wait_for_pending(first)
    assert backend.subscribed == {first, second}


@pytest.mark.parametrize("line", range(1, 13))
def test_two_wait_at_once(line):
    """Each has subscribed to what it waits for, even if the other was about to."""
    backend, now_staging, waits = Backend(), [True], []
    backend.wait_for_pending = lambda result: waits.append(result in backend.subscribed)
    wrap_backend(backend, lambda: now_staging[0])
    first, second = Result(), Result()
    backend.add_pending_result(first)
    backend.add_pending_result(second)
    now_staging[0] = False

    with at_line(line, backend.wait_for_pending, lambda: backend.wait_for_pending(second)):
        backend.wait_for_pending(first)
    assert waits == [True, True]
