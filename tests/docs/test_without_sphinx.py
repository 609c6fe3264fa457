"""The pages as a repository's host shows them: plain Markdown, without Sphinx."""

from __future__ import annotations

import re
import runpy
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *(page for page in sorted(DOCS.rglob("*.md")) if "_build" not in page.parts),
]
IDS = [str(page.relative_to(ROOT)) for page in PAGES]
sidebar = runpy.run_path(str(DOCS / "sidebar.py"))


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_link_has_words(page: Path) -> None:
    assert re.findall(r"(?<!!)\[\s*\]\([^)]*\)", page.read_text()) == []


def _anchors(page: Path) -> set[str]:
    """The anchors that a host gives the headings of a page: GitHub's, and those of its likes."""
    text = re.sub(r"^(`{3,}).*?^\1$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    found: Counter[str] = Counter()
    anchors = set()
    for heading in re.findall(r"^#{1,6} (.+)$", text, re.MULTILINE):
        words = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading.lower())
        anchor = re.sub(r"[^\w -]", "", words).replace(" ", "-")
        anchors.add(f"{anchor}-{found[anchor]}" if found[anchor] else anchor)
        found[anchor] += 1
    return anchors


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_every_link_leads_to_a_file_and_to_a_heading(page: Path) -> None:
    text = re.sub(r"^(`{3,}).*?^\1$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        path, _, anchor = target.partition("#")
        if "://" in path:
            continue
        other = (page.parent / path).resolve() if path else page
        assert other.exists(), target
        assert not anchor or other.suffix != ".md" or anchor in _anchors(other), target


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_directives_and_roles_are_in_the_reference_only(page: Path) -> None:
    """A host shows them as text."""
    if page.parent == DOCS / "reference" and page.name != "index.md":
        return
    assert re.findall(r"^(?:```|:::)\{[\w-]+\}|\{[a-z]+:?[a-z]*\}`", page.read_text(), re.M) == []


def test_the_sidebar_has_each_page_once() -> None:
    """It is made from the lists of links, so a list that a host shows has each page as well."""

    def walk(name: str) -> Iterator[str]:
        yield name
        for page in sidebar["below"](name, (DOCS / f"{name}.md").read_text()):
            yield from walk(str(Path(name).parent / page))

    pages = {str(page.relative_to(DOCS).with_suffix("")) for page in PAGES if DOCS in page.parents}
    assert Counter(walk("index")) == Counter(pages)


def test_a_first_version_has_only_what_it_has() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    _, *sections = re.split(r"^## ", text, flags=re.MULTILINE)
    first = sections[-1]
    assert first.startswith("0.1.0\n")
    assert len(first.splitlines()) <= 60
    assert re.findall(r"^### (?:Fixed|Changed|Removed)$", first, re.MULTILINE) == []
