"""The pages on the hardest subjects are read at one go: short, in short sentences.

The sentences of other pages, but those of the reference, have a bound, too.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = (
    "howto/split-a-table",
    "howto/poolers",
    "explanation/shards-and-leases",
    "explanation/duplicates",
    "explanation/reading-the-log",
    "explanation/log-on-mysql",
)
OTHERS = sorted(
    str(page.relative_to(DOCS).with_suffix(""))
    for kind in ("tutorial", "howto", "explanation")
    for page in DOCS.glob(f"{kind}/*.md")
)
WORDS, SENTENCE, LONGEST = 900, 27, 45
#: What is not read as a sentence: code, comments, and where a link leads to.
BESIDE = re.compile(r"^ *```.*?^ *```$|<!--.*?-->|(?<=\])\([^)]*\)", re.MULTILINE | re.DOTALL)
#: What ends a paragraph: an empty line, a point of a list, a heading, the cell of a table.
END = re.compile(r"\n\s*\n|^\s*[-*] |^#+ |\|", re.MULTILINE)


def read(page: str) -> str:
    return BESIDE.sub("", (DOCS / f"{page}.md").read_text())


def sentences(text: str) -> list[str]:
    return [
        sentence
        for paragraph in END.split(text)
        for sentence in re.split(r"(?<=[.!?])[)*\"]*\s+", " ".join(paragraph.split()))
    ]


@pytest.mark.parametrize("page", PAGES)
def test_it_is_short(page: str) -> None:
    assert len(re.findall(r"\w\S*", read(page))) <= WORDS


@pytest.mark.parametrize("page", PAGES)
def test_its_sentences_are_short(page: str) -> None:
    assert [each for each in sentences(read(page)) if len(each.split()) > SENTENCE] == []


@pytest.mark.parametrize("page", OTHERS)
def test_no_page_has_endless_sentences(page: str) -> None:
    assert [each for each in sentences(read(page)) if len(each.split()) > LONGEST] == []
