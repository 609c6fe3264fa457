"""The size of the package: its limit is in setup.cfg, and a change raises it on purpose."""

from __future__ import annotations

from collections import Counter
from configparser import ConfigParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "outbox_app"
MODULES = [path for path in PACKAGE.rglob("*.py") if "migrations" not in path.parts]

#: Files of one level of a room. The numbers of those named may only fall.
FILES = 16
LARGER = {"admin": 20, "pipeline": 21}


def test_the_package_has_no_more_lines_than_are_written_down() -> None:
    """In ``setup.cfg``: a number that a change raises on purpose."""
    config = ConfigParser()
    config.read(ROOT / "setup.cfg")
    limit = config.getint("outbox_app:size", "lines")
    lines = sum(len(path.read_text().splitlines()) for path in MODULES)
    assert lines <= limit


def test_no_level_of_a_room_has_many_files() -> None:
    levels = Counter(path.parent for path in MODULES if path.name != "__init__.py")
    found = {str(path.relative_to(PACKAGE)): count for path, count in levels.items()}
    limits = {name: LARGER.get(name, FILES) for name in found}
    assert {name: count for name, count in found.items() if count > limits[name]} == {}
