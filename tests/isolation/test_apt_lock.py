"""Set-up waits for another process that holds a lock of apt, as unattended upgrades do."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.servers import install

HOLDS = """
import fcntl, sys
with open(sys.argv[1], "w") as lock:
    fcntl.lockf(lock, fcntl.LOCK_EX)
    print("locked", flush=True)
    sys.stdin.read()
"""
#: A folder of apt's own, without sources: nothing is downloaded.
APT = """
Dir::State::Lists "{folder}";
Dir::Cache "{folder}";
Dir::Etc::SourceList "/dev/null";
Dir::Etc::SourceParts "/dev/null";
"""


@pytest.mark.skipif(not shutil.which("apt-get"), reason="needs apt-get")
def test_apt_waits_for_the_lock_of_the_package_lists(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configuration = tmp_path / "apt.conf"
    configuration.write_text(APT.format(folder=tmp_path))
    monkeypatch.setenv("APT_CONFIG", str(configuration))
    pauses: list[float] = []
    with subprocess.Popen(
        [sys.executable, "-S", "-c", HOLDS, tmp_path / "lock"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as holder:
        assert holder.stdin is not None
        assert holder.stdout is not None
        assert holder.stdout.readline()

        def end_the_holder(seconds: float) -> None:
            pauses.append(seconds)
            holder.communicate()

        time = SimpleNamespace(monotonic=install.time.monotonic, sleep=end_the_holder)
        monkeypatch.setattr(install, "time", time)
        install.apt_get("update")
    assert len(pauses) == 1


@pytest.mark.skipif(not shutil.which("apt-get"), reason="needs apt-get")
def test_another_error_of_apt_is_raised_at_once(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(seconds: float) -> None:
        raise AssertionError(f"waits for {seconds} s")

    # The module's own clock: other threads, as Spark's, sleep by the real one meanwhile.
    monkeypatch.setattr(install, "time", SimpleNamespace(monotonic=lambda: 0.0, sleep=refuse))
    with pytest.raises(subprocess.CalledProcessError):
        install.apt_get("no-such-action")
    assert "no-such-action" in capsys.readouterr().err
