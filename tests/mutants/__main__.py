"""Plant seeded bugs, and see which of them the tests notice: ``python -m tests.mutants``.

Run it under ``python -m tests.servers run --``, as ``make mutants`` does. First all tests of the
chosen bugs run on the code as it is: they have to pass. Then each bug is planted into a copy of the
project, and its tests run until one fails. A bug with which all of them pass twice has survived: a
test is missing. Exits with 1 if a bug survives, or if tests fail without one.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

from . import archive, entities, ids, jobs, prepared, readers, receipts
from .seeded import Bug

ROOT = Path(__file__).parents[2]
BUGS: list[Bug] = [
    bug for each in (jobs, receipts, readers, entities, prepared, ids, archive) for bug in each.BUGS
]
#: Exit codes of pytest.
PASSED, FAILED = 0, 1
_FIRST = re.compile(r"^(?:FAILED|ERROR) (\S+)", re.MULTILINE)


def main(arguments: Sequence[str] | None = None) -> int:
    options = _parse(arguments)
    chosen = [bug for bug in BUGS if not options.names or bug.name in options.names]
    if unknown := {*options.names} - {bug.name for bug in BUGS}:
        sys.exit(f"There is no seeded bug {min(unknown)!r}. --list names all.")
    if options.list:
        for bug in chosen:
            print(f"{bug.promise:8} {bug.name:42} {bug.why}")
        return 0
    if options.sample:
        chosen = random.sample(chosen, min(options.sample, len(chosen)))
    with tempfile.TemporaryDirectory(prefix="outbox-mutants-") as folder:
        copy = Path(folder) / "project"
        _copy(copy)
        if not options.sample and (failed := _failing(copy, chosen)):
            print(f"fails without a bug: {failed}", file=sys.stderr)
            return 1
        results = [_try(bug, copy) for bug in chosen]
    survivors = [result["bug"] for result in results if result["noticed_by"] is None]
    if options.to:
        Path(options.to).write_text(json.dumps(results, indent=1) + "\n")
    print(f"{len(results) - len(survivors)} of {len(results)} seeded bugs were noticed")
    return 1 if survivors else 0


def _parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="bugs to plant, by default all")
    parser.add_argument("--list", action="store_true", help="name the bugs, and plant none")
    parser.add_argument(
        "--sample",
        type=int,
        metavar="N",
        help="plant N of them, at random; their tests are taken to pass without them",
    )
    parser.add_argument("--to", metavar="FILE", help="write the results there, as JSON")
    return parser.parse_args(arguments)


def _copy(to: Path) -> None:
    """Copy what git knows of the working tree, so that a planted bug never reaches it."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    for name in filter(None, listed.stdout.split("\0")):
        if (ROOT / name).exists():  # not deleted since the last commit
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def _failing(copy: Path, bugs: Sequence[Bug]) -> str:
    """Return the first test of these bugs that fails on the code as it is."""
    code, said = _pytest(copy, sorted({test for bug in bugs for test in bug.tests}))
    return "" if code == PASSED else said


def _try(bug: Bug, copy: Path) -> dict[str, object]:
    path = bug.path(copy)
    sound = path.read_text()
    began = monotonic()
    try:
        path.write_text(bug.planted(sound))
        code, failed = _pytest(copy, bug.tests)
        if code == PASSED:  # a test with random histories, or with a race, has another go
            code, failed = _pytest(copy, bug.tests)
    finally:
        path.write_text(sound)
    noticed_by = failed if code == FAILED else None
    said = noticed_by or ("SURVIVED" if code == PASSED else f"pytest ended with {code}: {failed}")
    took = monotonic() - began
    print(f"{bug.promise:8} {bug.name:42} {took:5.0f} s  {said}", flush=True)
    found: dict[str, object] = {"bug": bug.name, "promise": bug.promise, "noticed_by": noticed_by}
    return {**found, "survived_at_first": True} if bug.survived_at_first else found


def _pytest(copy: Path, tests: Sequence[str]) -> tuple[int, str]:
    """Run tests in the copy until one fails; return pytest's exit code and that test."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
    run = subprocess.run(
        command,
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
    )
    found = _FIRST.search(run.stdout)
    last = (run.stdout + run.stderr).strip().splitlines()[-1:]
    return run.returncode, found[1] if found else " ".join(last)


if __name__ == "__main__":
    sys.exit(main())
