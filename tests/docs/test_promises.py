"""The promises are in one place, each with its condition, and the README links to them by words."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "explanation" / "promises.md"
NUMBERS = [f"P{number}" for number in range(1, 15)]


def table(page: Path) -> list[str]:
    lines = page.read_text().splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("| | promise |"))
    end = next(n for n, line in enumerate(lines) if n > begin and not line.startswith("|"))
    return lines[begin:end]


def test_every_promise_has_a_condition() -> None:
    rows = table(PAGE)[2:]
    assert [row.split("|")[1].strip() for row in rows] == NUMBERS
    assert [row for row in rows if not row.split("|")[3].strip()] == []


def test_each_section_has_words_as_its_heading_and_begins_with_its_number() -> None:
    sections = re.findall(r"^## (.+)\n\n(P\d+)(?: and (P\d+))?\. ", PAGE.read_text(), re.MULTILINE)
    assert [number for _, *numbers in sections for number in numbers if number] == NUMBERS
    headings = re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)
    assert headings == [heading for heading, *_ in sections]
    assert not re.search(r"\bP\d", " ".join(headings))


def test_the_readme_names_promises_by_words_and_leads_to_them() -> None:
    readme = README.read_text()
    named = re.findall(r"\[([^]]+)\]\(docs/explanation/promises\.md#(\S+)\)", readme)
    assert len(named) == 4
    for words, anchor in named:
        assert re.sub(r"[^\w -]", "", words.lower().replace("\n", " ")).replace(" ", "-") == anchor
    headings = re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert {anchor for _, anchor in named} <= anchors
    assert not re.search(r"\bP\d", readme)
