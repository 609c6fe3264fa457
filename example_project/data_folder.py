"""The folder for the example's files: database, broker, logs, ledgers, archive.

Only one ``demo`` or ``up`` may use the folder at a time, because the demo empties it first. The
demo removes only the files and folders that are listed here, so it is safe to set ``DATA_DIR`` to a
folder with other files.
"""

import contextlib
import fcntl
import shutil

from django.conf import settings

DATABASES = ["shop.sqlite3", "payments.sqlite3"]
FILES = [f"{name}{end}" for name in DATABASES for end in ("", "-wal", "-shm")] + ["audit.html"]
FOLDERS = ["archive", "broker", "ledger", "logs"]


class InUseError(Exception):
    """Another program of the example is using the folder."""


@contextlib.contextmanager
def in_use():
    """Lock the folder for this process; raise InUseError if another process has locked it."""
    settings.DATA_DIR.mkdir(parents=True, exist_ok=True)
    (settings.DATA_DIR / ".gitignore").write_text("*\n")
    with (settings.DATA_DIR / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise InUseError(
                f"{settings.DATA_DIR} is in use by another `demo` or `up`. "
                "Stop that one first, or give this one a folder of its own: DATA_DIR=…"
            ) from None
        yield settings.DATA_DIR


def empty():
    """Remove the files of an earlier run. Call this before the first database connection."""
    for name in FILES:
        (settings.DATA_DIR / name).unlink(missing_ok=True)
    for name in FOLDERS:
        shutil.rmtree(settings.DATA_DIR / name, ignore_errors=True)


def make():
    """Make the folders that the demo writes to."""
    for name in FOLDERS:
        (settings.DATA_DIR / name).mkdir(exist_ok=True)
