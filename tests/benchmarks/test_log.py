"""The benchmarks of the log run, and their harness finds lost, repeated and inverted rows."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests import forking
from tests.faults.tools import ROOT, on
from tests.patience import patience

Environment = Callable[[str], dict[str, str]]
NOTHING = {"lost": 0, "tails": 0, "duplicated": 0, "inverted": 0, "phantoms": 0}


def run(*arguments: str, environment: dict[str, str]) -> str:
    done = forking.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=patience(100),
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@on("postgres", "mariadb")
def test_a_late_commit_is_caught_where_it_is_lost(alias: str, environment: Environment) -> None:
    variables = environment(alias)
    variables["BENCHMARK_URL"] = variables[f"{alias.upper()}_URL"]
    verdicts = json.loads(run("tests.benchmarks.late_commit", environment=variables))
    found = {name: {what: v[what] for what in NOTHING} for name, v in verdicts.items()}
    # Of the stream that went on, the hole can be seen; the end of the other one cannot.
    assert found["naive"] == {**NOTHING, "lost": 2, "tails": 1}
    assert found["window"] == NOTHING
    assert found["broken"]["duplicated"] == 2
    assert found["turned"]["inverted"] == 1


@on("postgres", "mariadb")
def test_losses_runs(alias: str, environment: Environment, tmp_path: Path) -> None:
    file = tmp_path / "losses.json"
    arguments = ["--scale", "0.001", "--database", alias, "--json", str(file)]
    output = run("benchmarks", "losses", *arguments, environment=environment(alias))
    result: dict[str, Any] = json.loads(file.read_text())
    committed = sum(phase["rows"] for phase in result["written"])
    assert committed >= 200
    assert set(result["readers"]) == {"naive", "completeness", "window"}
    for reader in result["readers"].values():
        assert reader["delivered"] + reader["lost"] == committed
        assert reader["phantoms"] == 0
    assert result["ratios"] == {"window_lost": 0, "window_duplicated": 0, "window_inverted": 0}
    assert all(name in output for name in result["ratios"])
