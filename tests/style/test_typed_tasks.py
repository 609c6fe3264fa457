"""Calls of a shared task, as mypy sees them in a project where Celery has no types.

``typed_project`` is the same with celery-types, for mypy and pyright, in ``make lint``.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
#: celery-types is installed here: mypy must not follow it.
UNTYPED = """
[mypy]
[mypy-celery.*,kombu.*]
follow_imports = skip
follow_imports_for_stubs = True
ignore_missing_imports = True
"""
TASKS = """
from outbox_app import stage, stage_many
from outbox_app.celery import shared_task

@shared_task
def thank(order: int) -> str:
    return str(order)

@shared_task(bind=True, immediate=True, queue="slow")
def pack(self, order: int) -> None:
    self.retry(countdown=3)

def good() -> None:
    thank.delay(1).get()
    thank.apply_async((1,), ordering_key="a", immediate=True, using="default", countdown=3)
    pack.apply_async([1], {}, ordering_key="a")
    thank.s(1).set(queue="slow")
    thank.anything_of_celery()
    stage(thank, (1,), ordering_key="a", queue="slow")
    stage_many([thank.s(1)], immediate=True, countdown=3)
"""
WRONG = {
    'thank.apply_async((1,), ordering_kye="a")': "ordering_kye",
    "thank.apply_async((1,), imediate=True)": "imediate",
    "thank.apply_async((1,), ordering_key=1)": "ordering_key",
    'thank.apply_async_on_commit((1,), ordering_kye="a")': "ordering_kye",
    'stage(thank, (1,), orderingkey="a")': "orderingkey",
    "stage_many([], imediate=True)": "imediate",
    'thank.delay("first")': '"str"; expected "int"',
    'pack.delay("first")': '"str"; expected "int"',
    "shared_task(imediate=True)": "No overload",
}


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_misspelt_option_is_an_error_and_the_documented_calls_are_none(tmp_path: Path) -> None:
    (tmp_path / "mypy.ini").write_text(UNTYPED)
    first = TASKS.count("\n") + 1
    (tmp_path / "tasks.py").write_text(TASKS + "\n".join(WRONG))
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--no-error-summary", "tasks.py"],
        cwd=tmp_path,
        env={"MYPYPATH": str(ROOT)},
        capture_output=True,
        text=True,
    )
    errors = dict(re.findall(r"^tasks\.py:(\d+): error: (.*)", done.stdout, re.MULTILINE))
    assert list(map(int, errors)) == [*range(first, first + len(WRONG))], done.stdout + done.stderr
    assert all(part in error for part, error in zip(WRONG.values(), errors.values(), strict=True))
