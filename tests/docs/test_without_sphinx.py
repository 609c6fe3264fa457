"""The pages as a repository's host shows them: plain Markdown, without Sphinx."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.parts),
]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
TOCTREE = re.compile(r"^```\{toctree\}\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_link_has_words(page: Path) -> None:
    assert re.findall(r"(?<!!)\[\s*\]\([^)]*\)", page.read_text()) == []


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_directives_and_roles_are_in_the_reference_and_the_indexes_only(page: Path) -> None:
    """A host shows them as text. A hidden table of contents is for the sidebar, after all words."""
    text = page.read_text()
    if page.is_relative_to(DOCS / "reference"):
        return
    before, *_ = text.partition("```{toctree}") if page.name == "index.md" else [text]
    assert re.findall(r"^(?:```|:::)\{[\w-]+\}|\{[a-z]+:?[a-z]*\}`", before, re.MULTILINE) == []
    rest = TOCTREE.sub("", text[len(before) :])
    assert rest.strip() == ""
    assert all(":hidden:" in block for block in TOCTREE.findall(text))


@pytest.mark.parametrize(
    "index", sorted(DOCS.rglob("index.md")), ids=lambda index: str(index.relative_to(DOCS))
)
def test_what_the_sidebar_lists_is_linked_by_the_index_or_a_page_that_it_links(index: Path) -> None:
    if index.is_relative_to(DOCS / "reference"):
        return
    text = index.read_text()
    pages = [index.parent / name for name in re.findall(r"\]\(([\w/-]+\.md)\)", text)]
    linked = text + "".join(page.read_text() for page in pages if page.parent == index.parent)
    for block in TOCTREE.findall(text):
        for name in re.findall(r"^[a-z][\w/-]+$", block, re.MULTILINE):
            assert f"]({name}.md)" in linked


def test_a_first_version_has_only_what_it_has() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    _, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    first = sections[-1]
    assert first.startswith("0.1.0\n")
    assert len(first.splitlines()) <= 60
    assert re.findall(r"^### (?:Fixed|Changed|Removed)$", first, re.MULTILINE) == []
