"""Installs the Debian packages that the test servers and the browser tests need.

A package counts as missing if the program or file that we use from it cannot be found, so a server
that was installed by other means is left alone. If we are root, apt installs the missing packages,
without questions and without starting any system service. Other users get a ``MissingPackages``
error that names the packages and the apt command.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path

POLICY_FILE = Path("/usr/sbin/policy-rc.d")
SECONDS_FOR_A_LOCK = 600
EXTRA_FOLDERS = ("/usr/sbin", "/sbin", "/usr/local/sbin", "/usr/lib/rabbitmq/bin")


class MissingPackages(RuntimeError):
    def __init__(self, packages: list[str]) -> None:
        self.packages = packages
        super().__init__(
            f"missing packages: {' '.join(packages)}\n"
            f"install them with: sudo apt-get install --no-install-recommends {' '.join(packages)}"
        )


def find_program(name: str, *, patterns: tuple[str, ...] = ()) -> str | None:
    """Return the newest file that matches a pattern, else the program of that name, else None."""
    for pattern in patterns:
        found = sorted(glob.glob(pattern), key=_numbers_in)
        if found:
            return found[-1]
    folders = [os.environ.get("PATH", os.defpath), *EXTRA_FOLDERS]
    return shutil.which(name, path=os.pathsep.join(folders))


def find_postgres_program(name: str) -> str | None:
    return find_program(name, patterns=(f"/usr/lib/postgresql/*/bin/{name}",))


def find_rabbitmq_program(name: str) -> str | None:
    # Debian's /usr/sbin/rabbitmq-server is a wrapper that switches to the user "rabbitmq".
    return find_program(name, patterns=(f"/usr/lib/rabbitmq/bin/{name}",))


def missing_packages() -> list[str]:
    return [package for package, is_present in _PRESENT.items() if not is_present()]


def install() -> list[str]:
    """Install the missing packages. Returns their names."""
    missing = missing_packages()
    if not missing:
        return []
    if os.geteuid() != 0 or not shutil.which("apt-get"):
        raise MissingPackages(missing)
    with _no_service_starts():
        apt_get("update")
        apt_get("install", "--no-install-recommends", *missing)
    still_missing = missing_packages()
    if still_missing:
        raise MissingPackages(still_missing)
    return missing


def apt_get(*action: str) -> None:
    """Run apt-get, and wait for another process that holds a lock, as unattended upgrades do.

    apt-get itself waits for the lock of dpkg's database only, and fails at once for those of the
    package lists and of the downloaded archives.
    """
    options = ("-y", "-q", "-o", "Dpkg::Options::=--force-confold")
    wait = ("-o", f"DPkg::Lock::Timeout={SECONDS_FOR_A_LOCK}")
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive", "LC_ALL": "C.UTF-8"}
    deadline = time.monotonic() + SECONDS_FOR_A_LOCK
    while True:
        done = subprocess.run(
            ["apt-get", *options, *wait, *action],
            env=environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        print(done.stderr, end="", file=sys.stderr, flush=True)
        if done.returncode == 0:
            return
        if "Could not get lock" not in done.stderr or time.monotonic() > deadline:
            done.check_returncode()
        time.sleep(2)


@contextlib.contextmanager
def _no_service_starts() -> Iterator[None]:
    """Forbid package scripts to start services. A policy that already exists is kept."""
    try:
        descriptor = os.open(POLICY_FILE, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o755)
    except FileExistsError:
        yield
        return
    try:
        with open(descriptor, "w") as policy:
            policy.write("#!/bin/sh\nexit 101\n")
        POLICY_FILE.chmod(0o755)
        yield
    finally:
        POLICY_FILE.unlink(missing_ok=True)


def _numbers_in(path: str) -> list[int]:
    return [int(part) for part in path.split("/") if part.isdigit()]


def _program(name: str) -> Callable[[], bool]:
    return lambda: find_program(name) is not None


def _python_headers() -> bool:
    return os.path.exists(os.path.join(sysconfig.get_paths()["include"], "Python.h"))


_PRESENT: dict[str, Callable[[], bool]] = {
    "postgresql": lambda: find_postgres_program("postgres") is not None,
    "mariadb-server": lambda: find_program("mariadbd") is not None,
    "redis-server": _program("redis-server"),
    "rabbitmq-server": lambda: find_rabbitmq_program("rabbitmq-server") is not None,
    "etcd-server": _program("etcd"),
    "pgbouncer": _program("pgbouncer"),
    "chromium-headless-shell": _program("chromium-headless-shell"),
    "faketime": _program("faketime"),
    "prometheus": _program("promtool"),
    "openjdk-17-jre-headless": _program("java"),
    "libmariadb-dev": _program("mariadb_config"),
    "pkg-config": _program("pkg-config"),
    "gcc": _program("gcc"),
    "python3-dev": _python_headers,
}
