"""A soft time limit that hits while a job is staged leaves nothing that decides on later calls."""

from __future__ import annotations

import contextlib
import dis
import sys
from collections.abc import Iterator
from itertools import pairwise
from types import CodeType
from typing import Any

import pytest
from celery import group
from django.db import transaction

from outbox_app import stage
from outbox_app.jobs.staging.calls import Around, around, force_staging, surrounded
from outbox_app.models import StagedJob

MANAGER = contextlib._GeneratorContextManager
CODES = [MANAGER.__enter__.__code__, MANAGER.__exit__.__code__]


class SoftLimit(Exception):
    """As Celery's, which the handler of a signal raises."""


def places(code: CodeType) -> Iterator[int]:
    """Yield where Python handles signals: when a function begins, and after each call."""
    for before, step in pairwise(dis.get_instructions(code)):
        if before.opname == "RESUME" or before.opname.startswith("CALL"):
            yield step.offset


@contextlib.contextmanager
def raising_at(code: CodeType, place: int, turn: int) -> Iterator[list[int]]:
    """Raise in the code at a place, when it is there for the given time."""
    left, tracer = [turn], sys.gettrace()

    def trace(frame: Any, event: str, arg: Any) -> Any:
        if frame.f_code is not code:
            return trace if event == "call" else None
        frame.f_trace_opcodes = True
        if event == "opcode" and frame.f_lasti == place:
            left[0] -= 1
            if left[0] == 0:
                raise SoftLimit
        return trace

    sys.settrace(trace)
    try:
        yield left
    finally:
        sys.settrace(tracer)


def each_place() -> Iterator[tuple[CodeType, int]]:
    for code in CODES:
        for place in places(code):
            yield code, place


@pytest.mark.parametrize(("code", "place"), [*each_place()])
@pytest.mark.parametrize("turn", [1, 2])
def test_blocks_inside_each_other(code: CodeType, place: int, turn: int) -> None:
    try:
        with (
            raising_at(code, place, turn),
            force_staging(using="a", ordering_key="k"),
            surrounded(staged="t"),
        ):
            pass
    except SoftLimit:
        pass
    left = around.get()
    around.set(Around())
    assert left == Around()


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("alias", ["default"], indirect=True)
@pytest.mark.parametrize(("code", "place"), [*each_place()])
def test_a_call_after_a_call_that_was_interrupted(
    alias: str, add: Any, code: CodeType, place: int
) -> None:
    """It is sent, as ever: a retry that were staged would go with its task's transaction."""
    wrong, turn, is_there = list[Any](), 0, True
    while is_there and turn < 100:
        turn += 1
        try:
            with transaction.atomic(using=alias), raising_at(code, place, turn) as left:
                stage(add, (1, 1), using=alias, ordering_key="k")
        except SoftLimit:
            pass
        is_there = left[0] == 0
        StagedJob.objects.using(alias).delete()
        with transaction.atomic(using=alias):
            add.apply_async((2, 2), retries=1)  # what Task.retry() calls
            wrong += [(turn, each.ordering_key) for each in StagedJob.objects.using(alias).all()]
            transaction.set_rollback(True, using=alias)  # Task.retry() raises
        around.set(Around())
    assert wrong == []


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("alias", ["default"], indirect=True)
@pytest.mark.parametrize(("code", "place"), [*each_place()])
def test_a_call_after_a_replacement_that_was_interrupted(
    alias: str, add: Any, code: CodeType, place: int
) -> None:
    """It is staged, as ever: if it were sent, it would leave before its transaction commits."""
    wrong, turn, is_there = list[int](), 0, True
    while is_there and turn < 100:
        turn += 1
        try:
            with raising_at(code, place, turn) as left, surrounded(is_replacing=True):
                add.apply_async((1, 1))  # as Task.replace() does
        except SoftLimit:
            pass
        is_there = left[0] == 0
        with transaction.atomic(using=alias):
            add.delay(2, 2)
            wrong += [] if StagedJob.objects.using(alias).exists() else [turn]
            transaction.set_rollback(True, using=alias)
        around.set(Around())
    assert wrong == []


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("alias", ["default"], indirect=True)
@pytest.mark.parametrize(("code", "place"), [*each_place()])
@pytest.mark.parametrize("of_group", [False, True], ids=["stage", "group"])
def test_a_call_where_the_interruption_is_handled(
    alias: str, add: Any, staged: Any, code: CodeType, place: int, of_group: bool
) -> None:
    """``except SoftTimeLimitExceeded: stage(clean_up)``: the traceback is alive, and its frames."""
    lost, turn, is_there = list[int](), 0, True
    while is_there and turn < 100:
        turn += 1
        with transaction.atomic(using=alias):
            try:
                with raising_at(code, place, turn) as left:
                    if of_group:
                        group([add.s(1, 1), add.s(3, 3)], app=add.app).apply_async()
                    else:
                        stage(add, (1, 1), using=alias)
            except SoftLimit:
                stage(add, (2, 2), using=alias)
                lost += [] if [2, 2] in staged() else [turn]
            transaction.set_rollback(True, using=alias)
        is_there = left[0] == 0
        around.set(Around())
    assert lost == []
