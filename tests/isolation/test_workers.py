"""A worker that dies or hangs fails one test; the next worker takes over its servers."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.patience import patience
from tests.servers import sets

FILE = Path(__file__).with_name("dying.py")
OWN = ("_URL", "PYTEST_XDIST", "OUTBOX_TEST")


@pytest.mark.slow
def test_workers_that_end_cost_one_test_each(
    request: pytest.FixtureRequest, tmp_path: Path
) -> None:
    kept = {key: value for key, value in os.environ.items() if not any(own in key for own in OWN)}
    notes = tmp_path / "notes"
    servers = [{"OUTBOX_TEST_SET": name} for name in ("first", "second")]
    command = [sys.executable, "-m", "pytest", str(FILE), "-n", "2", "--dist", "loadgroup"]
    with sets.offered(servers) as variables:
        run = subprocess.run(
            command,
            cwd=request.config.rootpath,
            env={**kept, **variables, "OUTBOX_TEST_GRACE": "1", "OUTBOX_TEST_NOTES": str(notes)},
            capture_output=True,
            text=True,
            check=False,
            timeout=patience(100),
        )
    said = run.stdout + run.stderr
    ended_badly = re.findall(r"^(?:ERROR|FAILED) \S+::(\w+)", run.stdout, re.MULTILINE)
    assert sorted(ended_badly) == [
        "test_hangs_where_its_time_limit_does_not_reach_it",
        "test_kills_its_worker",
    ], said
    assert " 24 passed" in f" {run.stdout.splitlines()[-1]}", said
    assert run.returncode == 1
    assert "Timeout" in run.stderr  # and where it hung
    assert len(set(notes.read_text().split())) == 1


def test_more_workers_than_sets_are_refused(request: pytest.FixtureRequest) -> None:
    command = [sys.executable, "-m", "pytest", str(FILE), "-n", "3"]
    kept = {key: value for key, value in os.environ.items() if not any(own in key for own in OWN)}
    with sets.offered([{"REDIS_URL": "redis://127.0.0.1:1/0"}] * 2) as variables:
        run = subprocess.run(
            command,
            cwd=request.config.rootpath,
            env={**kept, **variables},
            capture_output=True,
            text=True,
            check=False,
        )
    assert "3 workers need as many sets of servers; try: " in run.stderr
    assert run.returncode == pytest.ExitCode.USAGE_ERROR
