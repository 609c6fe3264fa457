"""The size of rooms: a level with many files is two rooms."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[2] / "outbox_app"
MODULES = [path for path in PACKAGE.rglob("*.py") if "migrations" not in path.parts]

#: Files of one level of a room: a capability has those for which Django and the core look (admin,
#: checks, doors), beside its own. The numbers of those named may only fall.
FILES = 20
#: ``entities`` has the form of its messages in a module that client, views and forwarding share.
LARGER = {"entities": 25, "pipeline": 22}


def test_no_level_of_a_room_has_many_files() -> None:
    levels = Counter(path.parent for path in MODULES if path.name != "__init__.py")
    found = {str(path.relative_to(PACKAGE)): count for path, count in levels.items()}
    limits = {name: LARGER.get(name, FILES) for name in found}
    assert {name: count for name, count in found.items() if count > limits[name]} == {}
