"""Figures of the committed runs that pages repeat in their sentences."""

from __future__ import annotations

import re

import pytest

from tests.docs.test_readme import ROOT, result

WORDS = {"seventeen": 17, "eighteen": 18, "nineteen": 19, "twenty": 20}


@pytest.mark.parametrize(
    ("page", "sentence", "run", "ratio"),
    [
        ("deviations", r"at (\S+) times the rate of a loop of", "drain", "drain_vs_delay"),
        (
            "comparison",
            r"moves about (\w+) times as many jobs as that relay",
            "peers",
            "move_vs_django-celery-outbox",
        ),
    ],
)
def test_a_page_has_the_figure_of_the_committed_run(
    page: str, sentence: str, run: str, ratio: str
) -> None:
    text = " ".join((ROOT / f"docs/explanation/{page}.md").read_text().split())
    [figure] = re.findall(sentence, text)
    measured = result(run)["ratios"][ratio]
    assert figure in (f"{measured:.1f}", *(w for w, n in WORDS.items() if n == round(measured)))
