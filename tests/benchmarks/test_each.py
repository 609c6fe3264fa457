"""Each benchmark of ``all`` with ``scale`` runs in its smallest size, and prints its results."""

from __future__ import annotations

import importlib
import inspect
import json
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from benchmarks import report
from benchmarks.__main__ import BENCHMARKS
from tests.benchmarks.test_log import Environment, run
from tests.faults.tools import on

SMALL = [
    name
    for name, needs in BENCHMARKS.items()
    if needs.of_all
    and find_spec(f"benchmarks.{name}")
    and "scale" in inspect.signature(importlib.import_module(f"benchmarks.{name}").run).parameters
]
#: Its peer is in an environment that only ``make bench`` makes.
BESIDE_A_PEER = {"drain_vs_peer"}


@on("postgres")
@pytest.mark.parametrize("name", SMALL)
def test_runs_in_its_smallest_size(
    name: str, alias: str, environment: Environment, tmp_path: Path, redis_url: str
) -> None:
    file = tmp_path / f"{name}.json"
    arguments = ["--quick", "--scale", "0.01", "--json", str(file)]
    output = run("benchmarks", name, *arguments, environment=environment(alias))
    result: dict[str, Any] = json.loads(file.read_text())
    assert result["rounds"]
    assert set(result["asked"]) - set(result["ratios"]) <= BESIDE_A_PEER
    assert {"cores", "memory_gb", "cpu", "load"} <= set(result["machine"])
    assert {"Django", "celery", "PostgreSQL"} <= set(result["versions"])
    report.write(tmp_path, [name])
    table = (tmp_path / report.TABLE).read_text()
    assert all(ratio in output and ratio in table for ratio in result["ratios"])


@pytest.mark.parametrize(
    ("value", "asked", "is_reached"),
    [
        (8.5, "at least 8.5", True),
        (8.4, "at least 8.5", False),
        (0.01, "at most 0.01", True),
        (0.02, "at most 0.01", False),
        (0, "0", True),
        (1, "0", False),
        (1, "", True),
    ],
)
def test_what_is_asked_is_reached_or_not(value: float, asked: str, is_reached: bool) -> None:
    assert report.reached(value, asked) == is_reached


def test_a_row_that_is_not_reached_or_not_measured_is_marked() -> None:
    result = {"ratios": {"a": 2.0, "b": 0.5}, "asked": {"a": "at least 3", "c": "at least 1"}}
    assert report.rows(result) == [
        ("a", "2", "at least 3", "not reached"),
        ("b", "0.5", "", ""),
        ("c", "", "at least 1", "not measured"),
    ]


def test_results_written_before_do_not_make_the_code_dirty(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    code, result = tmp_path / "code.py", results / "drain.json"
    code.touch()
    result.touch()
    for words in (
        ["init", "--quiet"],
        ["add", "."],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "a"],
    ):
        subprocess.run(["git", *words], cwd=tmp_path, check=True)
    monkeypatch.setattr(report, "RESULTS", results)

    result.write_text("{}")
    assert "dirty" not in report._commit()
    code.write_text("pass")
    assert report._commit().endswith("-dirty)")
