"""The table of ``python -m tests.times``."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests import times

JUNIT = """<?xml version="1.0"?>
<testsuites><testsuite name="pytest">
<testcase classname="tests.jobs.drain.test_drain" name="test_a" time="30.25" />
<testcase classname="tests.jobs.staging.test_many.TestMany" name="test_b[sqlite]" time="9.5" />
<testcase classname="tests.ids.test_ids" name="test_c@ids" time="1200.25" />
<testcase classname="tests.ids.test_ids" name="test_d" time="0.0"><skipped /></testcase>
</testsuite></testsuites>
"""


@pytest.fixture
def junit(tmp_path: Path) -> str:
    (tmp_path / "junit.xml").write_text(JUNIT)
    return str(tmp_path / "junit.xml")


def test_the_longest_folder_comes_first(junit: str, capsys: pytest.CaptureFixture[str]) -> None:
    times.main([junit])
    assert capsys.readouterr().out.splitlines() == [
        "| folder | tests | seconds | share |",
        "|---|--:|--:|--:|",
        "| `tests/ids` | 2 | 1,200 | 97% |",
        "| `tests/jobs` | 2 | 40 | 3% |",
        "| all | 4 | 1,240 | 100% |",
    ]


def test_folders_are_divided(junit: str, capsys: pytest.CaptureFixture[str]) -> None:
    times.main([junit, "--depth", "2"])
    rows = [line.split("|")[1].strip() for line in capsys.readouterr().out.splitlines()[2:]]
    assert rows == ["`tests/ids`", "`tests/jobs/drain`", "`tests/jobs/staging`", "all"]
