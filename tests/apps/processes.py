"""Processes of the project ``tests.apps.shop``."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests import forking

ROOT = Path(__file__).resolve().parents[2]


def variables(apps: str, folder: Path, **others: str) -> dict[str, str]:
    """Return the environment of a process.

    Args:
        apps: The package's apps: "core events" is ``outbox_app`` and ``outbox_app.events``.
        folder: Where its databases are.
        others: More variables.
    """
    names = ["outbox_app" if name == "core" else f"outbox_app.{name}" for name in apps.split()]
    return {
        **os.environ,
        "DJANGO_SETTINGS_MODULE": "tests.apps.shop.settings",
        "SHOP_APPS": " ".join(names),
        "SQLITE_FILE": str(folder / "shop.sqlite3"),
        **others,
    }


def run(
    *arguments: str, apps: str, folder: Path, **others: str
) -> subprocess.CompletedProcess[Any]:
    """Run Python with these arguments to its end."""
    return forking.run(
        [sys.executable, *arguments],
        cwd=ROOT,
        env=variables(apps, folder, **others),
        capture_output=True,
        text=True,
    )


def manage(
    *arguments: str, apps: str, folder: Path, **others: str
) -> subprocess.CompletedProcess[Any]:
    """Run a command of ``manage.py``."""
    return run("-m", "django", *arguments, apps=apps, folder=folder, **others)
