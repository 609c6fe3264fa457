"""What is promised is said in one way: the README's table is that of the page on the promises."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def table(page: Path) -> list[str]:
    lines = page.read_text().splitlines()
    begin = next(n for n, line in enumerate(lines) if line.startswith("| | promise |"))
    end = next(n for n, line in enumerate(lines) if n > begin and not line.startswith("|"))
    return lines[begin:end]


def test_readme_promises_what_the_page_promises_word_for_word() -> None:
    promises = table(ROOT / "docs" / "explanation" / "promises.md")
    assert table(ROOT / "README.md") == promises
    names = [row.split("|")[1].strip() for row in promises[2:]]
    assert names == ["P1", "P2", "P3", "P5", "P6", "P7", "P8", "P9", "P10", "P11", "P12"]


def test_every_promise_has_a_condition() -> None:
    rows = table(ROOT / "README.md")[2:]
    assert [row for row in rows if not row.split("|")[3].strip()] == []
