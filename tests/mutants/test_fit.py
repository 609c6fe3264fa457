"""Each seeded bug fits the code, so that it can be planted."""

from __future__ import annotations

import ast
import json

import pytest

from .__main__ import BUGS, ROOT
from .seeded import Bug, Unfit


def test_each_bug_fits_the_code_and_changes_it() -> None:
    for bug in BUGS:
        sound = bug.path(ROOT).read_text()
        planted = bug.planted(sound)
        assert ast.dump(ast.parse(planted)) != ast.dump(ast.parse(sound)), bug.name
        files = [argument for argument in bug.tests if argument.startswith("tests/")]
        assert files, bug.name
        for file in files:
            assert (ROOT / file.partition("::")[0]).exists(), (bug.name, file)
    assert len({bug.name for bug in BUGS}) == len(BUGS)


def test_a_bug_that_no_longer_fits_is_named() -> None:
    bug = Bug("gone", "P1", "text.py", [("no such text", "")], ["tests/text"], "Nothing.")
    with pytest.raises(Unfit, match=r"'gone' replaces a text that outbox_app/text\.py has 0 times"):
        bug.planted(bug.path(ROOT).read_text())


def test_the_results_are_those_of_all_bugs_and_none_survives() -> None:
    results = json.loads((ROOT / "tests/mutants/results.json").read_text())
    assert [each["bug"] for each in results] == [bug.name for bug in BUGS]
    assert all(each["noticed_by"] for each in results)
