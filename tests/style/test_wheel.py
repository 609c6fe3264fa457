"""The wheel has the whole package and nothing else; the sdist has all files of the project."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_string
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "outbox_app"


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel, built from the sdist, in a copy of the checkout: builds leave files behind."""
    copy = tmp_path_factory.mktemp("build") / "source"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "_build")
    shutil.copytree(ROOT, copy, ignore=ignored)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", "dist", "."]
    subprocess.run(command, cwd=copy, check=True, capture_output=True)
    return copy / "dist"


@pytest.fixture(scope="module")
def wheel(built: Path) -> zipfile.ZipFile:
    [path] = built.glob("*.whl")
    return zipfile.ZipFile(path)


@pytest.mark.slow
def test_the_sdist_holds_every_file_that_is_kept(built: Path) -> None:
    [path] = built.glob("*.tar.gz")
    with tarfile.open(path) as sdist:
        present = {name.partition("/")[2] for name in sdist.getnames()}
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    kept = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    expected = {name for name in kept.splitlines() if (ROOT / name).exists()}
    assert {name for name in expected - present if not name.startswith(".")} == set()


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
