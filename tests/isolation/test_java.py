"""If the Java of a Spark session dies, only the running test fails."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

FILE = Path(__file__).with_name("java_dies.py")


@pytest.mark.slow
def test_the_next_test_has_another_session(request: pytest.FixtureRequest) -> None:
    command = [sys.executable, "-m", "pytest", str(FILE), "-q", "-p", "no:randomly"]
    run = subprocess.run(
        command, cwd=request.config.rootpath, capture_output=True, text=True, check=False
    )
    ended_badly = re.findall(r"^(?:ERROR|FAILED) \S+::(\w+)", run.stdout, re.MULTILINE)
    assert ended_badly == ["test_a_dies"], run.stdout
    assert " 2 passed" in run.stdout.splitlines()[-1]
