"""The reference by app: ``events.md`` and ``events-*.md`` are of events, all others of the core.

Sharding is a room without an app, and has a page like one.
"""

from __future__ import annotations

import re
from pathlib import Path

from outbox_app.capability import capabilities

REFERENCE = Path(__file__).resolve().parents[1] / "docs" / "reference"
#: Names of apps in the order of pages, the core first.
APPS = ["outbox_app", *(app.name for app in capabilities() if app.name != "outbox_app")]
ROOMS = [*APPS, "outbox_app.sharding"]


def app_of(module: str) -> str:
    """The app, or the room, that a module or a public name belongs to."""
    return max((name for name in ROOMS if f"{module}.".startswith(f"{name}.")), key=len)


def pages(app: str) -> list[Path]:
    """The pages of an app. They are at least one."""
    rooms = {name.rpartition(".")[2]: name for name in ROOMS[1:]}
    found = [
        page
        for page in sorted(REFERENCE.glob("*.md"))
        if rooms.get(page.stem.partition("-")[0], "outbox_app") == app
    ]
    assert found, f"{app} has no page"
    return found


def text_of(app: str) -> str:
    return "\n".join(page.read_text() for page in pages(app))


def section(app: str, heading: str) -> str:
    """The text below a heading that begins so, on a page of the app; empty: there is none."""
    found = re.search(
        rf"^(#+) `{heading}`.*?(?=^#{{1,2}} |^\1 |\Z)", text_of(app), re.MULTILINE | re.DOTALL
    )
    return found[0] if found else ""


def headings(app: str) -> set[str]:
    """The names in code that headings of the app's pages begin with."""
    return set(re.findall(r"^#+ `(\w+)`", text_of(app), re.MULTILINE))
