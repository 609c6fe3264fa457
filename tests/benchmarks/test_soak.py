"""The soak runs: real servers and processes, a few faults, and a verdict with its exit code."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.soak import command
from tests.faults.tools import ROOT
from tests.patience import patience

pytestmark = [pytest.mark.slow, pytest.mark.timeout(400)]


@pytest.mark.parametrize("broker", ["redis", "rabbitmq"])
def test_soak_runs(broker: str, tmp_path: Path) -> None:
    faults = ["kill-drainer", "kill-subscriptions", "failpoint-writer", "killed-at-commit"]
    command = [sys.executable, "-m", "benchmarks", "soak", "--database", "postgres"]
    command += ["--broker", broker]
    options = ["--minutes", "0.1", "--seed", "1", "--faults", ",".join(faults), "--immediate"]
    file = tmp_path / "result.json"
    done = subprocess.run(
        [*command, *options, "--json", str(file), "--keep", str(tmp_path / "logs")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=patience(380),
    )
    result = json.loads(file.read_text())
    assert set(result["broken"].values()) == {0}, done.stdout + done.stderr
    # Within seconds some of the hard things do not happen, and the run says so.
    assert done.returncode == (3 if result["did not happen"] else 0), done.stdout + done.stderr
    jobs, events = result["jobs"], result["events"]
    assert 0 < jobs["committed"] == jobs["accepted"] == jobs["executed"]
    assert jobs["published by writers"]
    assert len(set(events.values())) == 1
    assert "[postgres " in done.stdout
    assert (tmp_path / "logs" / "drainer0.log").exists()


def test_soak_names_a_fault_that_there_is_not() -> None:
    command = [sys.executable, "-m", "benchmarks", "soak", "--faults", "kill-everything"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=patience(60))
    assert done.returncode == 2
    assert "no such faults: kill-everything" in done.stderr


@pytest.mark.parametrize(("codes", "worst"), [([3, 3], 3), ([0, 3], 3), ([3, 1], 1), ([0, 0], 0)])
def test_a_broken_promise_is_worse_than_a_run_that_was_too_easy(codes, worst):
    assert command.worst_of(codes) == worst
