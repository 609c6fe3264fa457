"""Makes the sidebar from the pages' own lists of links, so that no page needs a directive for it.

Below an index, and below each page of ``howto`` that the index lists, are the pages of its list.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parent
LINK = re.compile(r"^- \[[^]]*\]\(([\w/-]+)\.md\)", re.MULTILINE)


def setup(app: Any) -> dict[str, Any]:
    """Set the extension up. Sphinx reads all pages again when the list of subjects has changed."""
    app.add_config_value("subjects", _subjects(), "env")
    app.connect("source-read", add)
    return {"parallel_read_safe": True}


def below(name: str, text: str) -> list[str]:
    """Return the pages below one, relative to its folder, in their order."""
    folder, _, page = name.rpartition("/")
    if page != "index" and (folder != "howto" or page not in _subjects()):
        return []
    return LINK.findall(text)


def add(app: Any, name: str, source: list[str]) -> None:
    """Receive ``source-read``."""
    if pages := below(name, source[0]):
        source[0] += "\n```{toctree}\n:hidden:\n\n" + "\n".join(pages) + "\n```\n"


def _subjects() -> list[str]:
    return LINK.findall((DOCS / "howto" / "index.md").read_text())
