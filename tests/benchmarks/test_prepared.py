"""The benchmark of prepared events runs, on each server that it can be run on."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.benchmarks.test_log import Environment, run
from tests.faults.tools import on


@on("postgres", "mariadb")
def test_prepared_runs(alias: str, environment: Environment, tmp_path: Path) -> None:
    file = tmp_path / "prepared.json"
    arguments = ["--quick", "--scale", "0.02", "--database", alias, "--json", str(file)]
    output = run("benchmarks", "prepared", *arguments, environment=environment(alias))
    result: dict[str, Any] = json.loads(file.read_text())
    assert set(result["ratios"]) == set(result["asked"])
    assert all(name in output for name in result["ratios"])
    for round in result["rounds"]:
        assert all(contestant["per_second"] > 0 for contestant in round.values())
