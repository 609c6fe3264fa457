"""``python -m tests.celery_suite``: what passes with ``Celery`` passes with ``OutboxCelery``.

Takes ``t/unit/app`` and ``t/unit/tasks`` out of the source distribution of the installed Celery,
runs them twice, and exits with 1 if a test passes with Celery alone. Further arguments are those
of pytest, like ``-k routes``. Needs a package registry and some minutes; leaves nothing behind.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import celery

from .comparison import lost, outcomes

#: What the tests import and this project does not have, in versions that go with what it has.
NEEDED = ["freezegun", "pydantic", "pytest-click"]
ROOT = Path(__file__).parents[2]
PIP = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]


def main(arguments: list[str]) -> int:
    with tempfile.TemporaryDirectory(prefix="outbox-celery-") as folder:
        tests = fetch(Path(folder))
        plain = run(tests, "Celery", arguments)
        staging = run(tests, "OutboxCelery", ["-p", "tests.celery_suite.substitution", *arguments])
    missed = lost(plain, staging)
    for name, outcome in missed.items():
        print(f"passes with Celery, not with OutboxCelery: {name} ({outcome})")
    count = sum(outcome == "passed" for outcome in plain.values())
    print(f"Celery {celery.__version__}: {count} tests pass, {len(missed)} not with OutboxCelery")
    return 1 if missed else 0


def fetch(folder: Path) -> Path:
    """Put the tests of the installed Celery into a folder, and beside it what they import."""
    wanted = f"celery=={celery.__version__}"
    download = ["download", "--no-deps", "--no-binary", "celery", "--dest", folder, wanted]
    subprocess.run([*PIP, *download], check=True)
    (archive,) = folder.glob("celery-*.tar.gz")
    with tarfile.open(archive) as source:
        # Not the package itself: it would take the place of the one that is installed.
        members = [m for m in source if m.name.split("/")[1:2] in (["t"], ["pyproject.toml"])]
        source.extractall(folder, members=members, filter="data")

    frozen = subprocess.run([*PIP, "freeze", "--exclude-editable"], check=True, capture_output=True)
    constraints = folder / "constraints.txt"
    constraints.write_bytes(frozen.stdout)
    install = ["install", "--target", folder / "lib", "--constraint", constraints, *NEEDED]
    subprocess.run([*PIP, *install], check=True)
    return archive.with_name(archive.name.removesuffix(".tar.gz"))


def run(tests: Path, name: str, arguments: list[str]) -> dict[str, str]:
    """Run the tests in a process of their own; return the outcome of each."""
    report = tests.with_name(f"{name}.xml")
    environment = {
        **{key: value for key, value in os.environ.items() if key != "DJANGO_SETTINGS_MODULE"},
        "PYTHONPATH": os.pathsep.join(map(str, [tests, ROOT, tests.with_name("lib")])),
    }
    plugins = ["no:randomly", "no:django", "no:cacheprovider", "celery.contrib.pytest"]
    command = [sys.executable, "-m", "pytest", *arguments]  # first: a plugin may go before Celery's
    command += [option for plugin in plugins for option in ("-p", plugin)]
    command += ["t/unit/app", "t/unit/tasks", "-q", "--tb=short", f"--junitxml={report}"]
    print(f"with {name}:", flush=True)
    subprocess.run(command, cwd=tests, env=environment, check=False)
    return outcomes(report)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
