"""Writes ``llms.txt`` beside the built pages (llmstxt.org): links to all pages, for programs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

FOLDERS = ("tutorial", "howto", "reference", "explanation")
ABOUT = (
    "> A transactional outbox for Django and Celery. `task.delay()` inside a transaction inserts a "
    "row; a drainer publishes the row after the commit. A rollback sends nothing."
)


def write(app: Any, exception: Exception | None) -> None:
    """Receive ``build-finished``. The pages are those that Sphinx has found, by folder."""
    if exception or app.builder.name != "html":
        return
    parts = ["# outbox_app", ABOUT]
    for folder in FOLDERS:
        pages = sorted(page for page in app.env.found_docs if page.startswith(f"{folder}/"))
        titles = {page: app.env.titles[page].astext() for page in pages}
        parts.append(f"## {titles[f'{folder}/index']}")
        parts.append("\n".join(f"- [{titles[page]}](_sources/{page}.md.txt)" for page in pages))
    (Path(app.outdir) / "llms.txt").write_text("\n\n".join(parts) + "\n")
