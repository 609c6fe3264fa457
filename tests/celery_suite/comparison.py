"""What two runs of the same tests had for outcomes, and which tests one of them lost."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from xml.etree import ElementTree

PASSED = "passed"
#: The worst first: a test that is reported more than once, for its subtests, has the worst.
_OUTCOMES = ("error", "failure", "skipped")


def outcomes(report: Path) -> dict[str, str]:
    """Return the outcome of each test of a JUnit report, by name."""
    found: dict[str, str] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        name = f"{case.get('classname')}::{case.get('name')}"
        outcome = next((kind for kind in _OUTCOMES if case.find(kind) is not None), PASSED)
        found[name] = min(found.get(name, PASSED), outcome, key=(*_OUTCOMES, PASSED).index)
    return found


def lost(plain: Mapping[str, str], staging: Mapping[str, str]) -> dict[str, str]:
    """Return the tests that pass in the first run and not in the second, with what became of them.

    Raises:
        ValueError: No test passes in the first run, so that the comparison would say nothing.
    """
    passed = [name for name, outcome in plain.items() if outcome == PASSED]
    if not passed:
        raise ValueError("No test passes with Celery itself. Look at the first run's output.")
    found = {name: staging.get(name, "missing") for name in passed}
    return {name: outcome for name, outcome in sorted(found.items()) if outcome != PASSED}
