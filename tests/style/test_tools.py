"""The commands of ``make lint`` and ``make docs`` have no findings. Each has its own test."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


def commands(target: str) -> list[str]:
    """The commands of a target of the Makefile."""
    recipe = re.search(
        rf"^{target}:.*\n((?:\t.+\n)+)", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert recipe
    values = {"$(BIN)/": "", "$(CURDIR)": str(ROOT), "$$": "$", "\t@": "\t"}
    lines = recipe[1].splitlines()
    for name, value in values.items():
        lines = [line.replace(name, value) for line in lines]
    return lines


def test_both_targets_are_read() -> None:
    assert len(commands("lint")) == 6
    assert len(commands("docs")) == 2


def test_docs_prints_the_address_of_the_first_page() -> None:
    sphinx, address = commands("docs")
    folder = sphinx.split()[-1]
    assert address.strip() == f"echo 'file://{ROOT}/{folder}/index.html'"


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "command", [line.strip() for target in ("lint", "docs") for line in commands(target)]
)
def test_it_finds_nothing(command: str) -> None:
    programs = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    environment = {name: value for name, value in os.environ.items() if "DJANGO" not in name}
    done = subprocess.run(
        command,
        shell=True,
        cwd=ROOT,
        env={**environment, "PATH": programs},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode:
        pytest.fail(f"{done.stdout}\n{command}: exit code {done.returncode}", pytrace=False)
