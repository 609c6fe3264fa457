"""The benchmark of commands of another service runs, with a server of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.benchmarks.test_log import Environment, run
from tests.faults.tools import on


@on("postgres")
def test_door_runs(alias: str, environment: Environment, tmp_path: Path) -> None:
    file = tmp_path / "door.json"
    arguments = ["--quick", "--scale", "0.02", "--database", alias, "--json", str(file)]
    output = run("benchmarks", "door", *arguments, environment=environment(alias))
    result: dict[str, Any] = json.loads(file.read_text())
    assert set(result["ratios"]) == set(result["asked"])
    assert all(name in output for name in result["ratios"])
    [turn] = result["rounds"]
    assert all(contest["per_second"] > 0 for contest in turn.values())
