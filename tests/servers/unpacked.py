"""Programs of Debian's unstable packages, in a folder of their own: nothing is installed.

The folder is made once, and stays: ``make clean`` leaves it. apt-get gets own lists, an own cache
and an empty list of what is installed, so it brings every library, the C library too, and leaves
the machine's alone. A program then starts through the loader of its folder.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from .base import ServerFailed
from .install import apt_get

_SOURCE = """\
Types: deb
URIs: {address}
Suites: sid
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
"""


def unpacked(*packages: str) -> Path:
    """Return the root folder of packages and of all that they depend on; download them first.

    Raises:
        ServerFailed: They cannot be downloaded here.
    """
    root = _cache() / "+".join(packages)
    with _locked(root):
        if not root.exists():
            try:
                _download(packages, root)
            except (OSError, subprocess.CalledProcessError) as error:
                raise ServerFailed(
                    f"{' '.join(packages)} of Debian's unstable suite is not to be had: {error}"
                ) from error
    return root


def command(root: Path, program: str) -> list[str]:
    """Return the beginning of a command that runs a program of the folder."""
    [loader] = root.glob("usr/lib/*/ld-linux-*.so.*")
    return [str(loader), "--library-path", str(loader.parent), str(root / program)]


def _download(packages: Sequence[str], root: Path) -> None:
    with tempfile.TemporaryDirectory(prefix="unpacked-", dir=root.parent) as name:
        folder = Path(name)
        for each in ("state", "lists/partial", "cache/archives/partial", "root"):
            (folder / each).mkdir(parents=True)
        (folder / "state/status").touch()
        (folder / "sid.sources").write_text(_SOURCE.format(address=_debian()))
        places = {
            "Dir::Etc::sourcelist": folder / "sid.sources",
            "Dir::Etc::sourceparts": "/dev/null",
            "Dir::State": folder / "state",
            "Dir::State::lists": folder / "lists",
            "Dir::State::status": folder / "state/status",
            "Dir::Cache": folder / "cache",
            # Its usual user may not read a folder of root's.
            "APT::Sandbox::User": "root",
            # Some images delete each archive that has been downloaded.
            "APT::Keep-Downloaded-Packages": "true",
            "APT::Update::Error-Mode": "any",
        }
        options = [part for key, value in places.items() for part in ("-o", f"{key}={value}")]
        apt_get(*options, "update")
        apt_get(*options, "--no-install-recommends", "--download-only", "install", *packages)
        for archive in folder.glob("cache/archives/*.deb"):
            subprocess.run(["dpkg-deb", "-x", archive, folder / "root"], check=True)
        (folder / "root").rename(root)


def _debian() -> str:
    """Return the address from which this machine gets Debian itself."""
    command = ["apt-get", "indextargets", "--no-release-info", "--format", "$(REPO_URI)"]
    found = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    for address in found:
        if address.rstrip("/").endswith("/debian"):
            return address
    raise OSError("the sources of apt name no folder 'debian'")


def _cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base, "outbox_app")


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let one process at a time make a folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(f"{path}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
