"""The promises are in one place, each with its condition, and the README links to them."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
PAGE = ROOT / "docs" / "explanation" / "promises.md"


def table(page: Path) -> list[str]:
    lines = page.read_text().splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("| | promise |"))
    end = next(n for n, line in enumerate(lines) if n > begin and not line.startswith("|"))
    return lines[begin:end]


def test_every_promise_has_a_condition() -> None:
    rows = table(PAGE)[2:]
    names = [row.split("|")[1].strip() for row in rows]
    assert names == [f"P{number}" for number in range(1, 14) if number != 4]
    assert [row for row in rows if not row.split("|")[3].strip()] == []


def test_the_readme_names_promises_and_leads_to_them() -> None:
    named = dict(
        re.findall(r"\[(P\d+)\]\(docs/explanation/promises\.md#(\S+)\)", README.read_text())
    )
    assert set(named) == {"P1", "P2", "P3", "P5"}
    headings = re.findall(r"^## (.+)$", PAGE.read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    assert set(named.values()) <= anchors


def test_the_readme_is_read_in_a_minute() -> None:
    assert len(README.read_text().split()) <= 650
