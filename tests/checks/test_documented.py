"""Each id is on the page of the checks, and each id of the page exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
ID = re.compile(r"outbox\.[EW]\d{3}")


def test_ids_are_documented():
    package = ROOT / "outbox_app"
    paths = [*(package / "checks").glob("*.py"), package / "log" / "soundness.py"]
    sources = [path.read_text() for path in paths]
    used = {id for text in sources for id in re.findall(r'id="(.*)"', text)}
    page = (ROOT / "docs" / "reference" / "checks.md").read_text()
    documented = re.findall(r"^\| `(.*?)` \|", page, flags=re.MULTILINE)
    assert used
    assert all(ID.fullmatch(id) for id in used)
    assert sorted(used) == sorted(documented)
