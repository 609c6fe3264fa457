"""The benchmark of the fleet runs, and no caller sees an error while its servers are killed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.benchmarks.test_log import Environment, run
from tests.faults.tools import on


@on("postgres")
def test_fleet_runs(alias: str, environment: Environment, tmp_path: Path) -> None:
    file = tmp_path / "fleet.json"
    arguments = ["--quick", "--scale", "0.02", "--database", alias, "--json", str(file)]
    output = run("benchmarks", "fleet", *arguments, environment=environment(alias))
    result: dict[str, Any] = json.loads(file.read_text())
    assert set(result["ratios"]) == set(result["asked"]) | {
        "ids_vs_uuid4_4_threads",
        *(f"sharded_vs_plain_{kind}" for kind in ("inserts", "inserts_by_hundreds", "look_ups")),
    }
    assert all(name in output for name in result["ratios"])
    assert result["ratios"]["errors_of_callers"] == 0, result["routing"]["errors"]
    [turn] = result["routing"]["rounds"]
    assert all(contest["per_second"] > 0 for contest in turn.values())
