"""A test that is aborted makes no other test fail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import VARIABLES

FILE = Path(__file__).with_name("broken_off.py")


@pytest.mark.slow
def test_a_teardown_that_is_broken_off_costs_its_own_test_alone(
    request: pytest.FixtureRequest,
) -> None:
    # In the order of the file: this one comes first, and every other one after it.
    command = [sys.executable, "-m", "pytest", str(FILE), "-q", "-p", "no:randomly"]
    run = subprocess.run(
        command, cwd=request.config.rootpath, capture_output=True, text=True, check=False
    )
    ended_badly = re.findall(r"^(?:ERROR|FAILED) \S+::(\w+)", run.stdout, re.MULTILINE)
    assert ended_badly == ["test_a_broken_off"], run.stdout
    neighbours = 2 * len({"default", *(name for name in VARIABLES if _is_there(name))})
    # The body of the first one passes, too.
    assert f" {neighbours + 1} passed" in f" {run.stdout.splitlines()[-1]}"


def _is_there(alias: str) -> bool:
    return bool(os.environ.get(VARIABLES[alias]))
