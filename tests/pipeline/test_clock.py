"""The clock of an archiving process is an hour wrong: the order is that of versions, not of times,
and files that may be deleted are a week old, far more than an hour.

Real processes run under ``libfaketime``; the times of files come from a right clock.
"""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
from dataclasses import asdict
from itertools import pairwise

import pytest

from tests.faults.test_wrong_clock import LIBRARY
from tests.faults.tools import ROOT, on

from .harness import age, assert_exact, commits, leftovers, publish_some, source


@pytest.fixture
def archive(alias, tmp_path):
    """``archive(hours, point)``: archive with a clock that is ahead; killed at the point."""
    if not (library := glob.glob(LIBRARY)):
        pytest.skip("no libfaketime")

    def run(hours, point="none"):
        clock = {"LD_PRELOAD": library[0], "FAKETIME": f"{hours:+d}h", "NO_FAKE_STAT": "1"}
        clock["FAKETIME_DONT_FAKE_MONOTONIC"] = "1"
        options, folder = json.dumps(asdict(source(alias))), str(tmp_path / "archive")
        done = subprocess.run(
            [sys.executable, "-m", "tests.pipeline.archiver", options, folder, "4"],
            cwd=ROOT,
            env={**os.environ, **clock},
            input=f"{point} 1\n",
            capture_output=True,
            text=True,
            check=True,
        )
        return done.stdout.strip()

    return run


@pytest.mark.django_db(transaction=True)
@on("default")
def test_a_clock_that_is_an_hour_off(alias, new_log, archive, tmp_path):
    folder = tmp_path / "archive"
    publish_some(alias, 40)
    assert archive(+1, "archive_copied") == "killed"
    orphans = leftovers(folder)
    assert orphans
    assert archive(-1, "compaction_written") == "killed"
    age(folder, 7 - 2 / 24)
    for hours in (+1, -1):
        publish_some(alias, 4)
        assert archive(hours) == "done"
    assert orphans < leftovers(folder)
    infos = [each["commitInfo"] for actions in commits(folder) for each in actions[:1]]
    times = [info["timestamp"] for info in infos]
    assert any(later < earlier - 6e6 for earlier, later in pairwise(times))  # two hours, nearly
    age(folder, 7 + 2 / 24)
    assert archive(-1) == "done"
    assert not orphans & leftovers(folder)
    assert_exact(alias, folder)
