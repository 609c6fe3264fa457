"""The built wheel holds the whole package and nothing else."""

from __future__ import annotations

import shutil
import subprocess
import sys
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "outbox_app"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    """A wheel that was built by way of the sdist, from a copy, as builds leave files behind."""
    copy = tmp_path_factory.mktemp("build") / "source"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "_build")
    shutil.copytree(ROOT, copy, ignore=ignored)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", "."]
    subprocess.run(command, cwd=copy, check=True, capture_output=True)
    [path] = (copy / "dist").glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.mark.slow
def test_it_holds_every_file_of_the_package(wheel: zipfile.ZipFile) -> None:
    present = {name for name in wheel.namelist() if name.startswith("outbox_app/")}
    expected = {
        path.relative_to(ROOT).as_posix()
        for path in PACKAGE.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert present == expected
    assert {"outbox_app/py.typed", "outbox_app/migrations/__init__.py"} <= present


@pytest.mark.slow
def test_it_holds_nothing_else(wheel: zipfile.ZipFile) -> None:
    folders = {name.partition("/")[0] for name in wheel.namelist()}
    assert folders == {"outbox_app", "outbox_app-0.1.0.dist-info", "pyspark_outbox.py"}
    assert "outbox_app/pipeline/log4j2.properties" in wheel.namelist()


@pytest.mark.slow
def test_it_installs_django_and_celery_only(wheel: zipfile.ZipFile) -> None:
    [metadata] = [name for name in wheel.namelist() if name.endswith("/METADATA")]
    requirements = message_from_string(wheel.read(metadata).decode()).get_all("Requires-Dist")
    assert requirements is not None
    assert sorted(name for name in requirements if "extra ==" not in name) == [
        "Django>=5.2",
        "celery>=5.5",
    ]
