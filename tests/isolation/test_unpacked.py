"""MySQL is downloaded once; where it is not to be had, that is said in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.servers import __main__ as servers
from tests.servers import unpacked as unpacking
from tests.servers.unpacked import unpacked


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "outbox_app"


def no_network(*action: str) -> None:
    raise subprocess.CalledProcessError(100, ["apt-get", action[-1]])


def test_what_is_there_is_not_downloaded(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(unpacking, "apt_get", no_network)
    (cache / "some").mkdir(parents=True)
    assert unpacked("some") == cache / "some"


def test_nothing_is_left_of_what_is_not_to_be_had(
    cache: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(unpacking, "apt_get", no_network)
    assert servers.main(["unpack"]) == 1
    said = capsys.readouterr()
    assert "mysql-client-core of Debian's unstable suite is not to be had" in said.err
    assert [each.suffix for each in cache.iterdir()] == [".lock"]


def test_the_summary_has_what_is_known_of_mysql(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTBOX_TEST_NOTE", "MySQL: not to be had here.")
    command = (sys.executable, "-m", "pytest", "tests/isolation/needy.py", "-k", "alone")
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    *_, note, result = ended.stdout.splitlines()
    assert note == "MySQL: not to be had here."
    assert "1 passed" in result
