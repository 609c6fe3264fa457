"""Writes ``llms.txt`` beside the built pages (llmstxt.org): links to all pages, for programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOLDERS = ("tutorial", "howto", "reference", "explanation")
ABOUT = (
    "> A transactional outbox for Django and Celery. `task.delay()` inside a transaction inserts a "
    "row; a drainer publishes the row after the commit. A rollback sends nothing."
)
HOW = (
    "These files are the sources of the pages. A link in them to `x.md` leads to `x.md.txt` here. "
    "Signatures that Sphinx takes from the code are in the built page only: `reference/x.html`."
)


def write(app: Any, exception: Exception | None) -> None:
    """Receive ``build-finished``. The pages are those that Sphinx has found, by folder."""
    if exception or app.builder.name != "html":
        return
    start = (
        f"- [{app.env.titles['index'].astext()}](_sources/index.md.txt): the apps, and the words"
    )
    parts = ["# outbox_app", ABOUT, HOW, start]
    for folder in FOLDERS:
        pages = sorted(page for page in app.env.found_docs if page.startswith(f"{folder}/"))
        titles = {page: app.env.titles[page].astext() for page in pages}
        parts.append(f"## {titles[f'{folder}/index']}")
        parts.append("\n".join(f"- [{titles[page]}](_sources/{page}.md.txt)" for page in pages))
    (Path(app.outdir) / "llms.txt").write_text("\n\n".join(parts) + "\n")
