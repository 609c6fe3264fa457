"""Figures of the committed runs that pages repeat in their sentences."""

from __future__ import annotations

import re
from statistics import median

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


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("scattered", "executed where they arrive"),
        ("routed", "passed on (`routed_vs_scattered`)"),
        ("direct", "all callers at the leader"),
    ],
)
def test_the_table_of_routing_is_that_of_the_committed_run(kind: str, words: str) -> None:
    text = (ROOT / "docs/reference/fleet.md").read_text()
    rounds = result("fleet")["routing"]["rounds"]
    speed = median(each[kind]["per_second"] / each["scattered"]["per_second"] for each in rounds)
    p50, p99 = (1000 * median(each[kind][name] for each in rounds) for name in ("p50", "p99"))
    conflicts = median(each[kind]["conflicts"] for each in rounds)
    cpu = 1000 * median(sum(each[kind]["cpu_per_command"]) for each in rounds)
    rate = "1" if kind == "scattered" else f"{speed:.2f}"
    clashes = f"{conflicts:.3f}" if conflicts else "0"
    row = f"| {words} | {rate} | {p50:.0f} ms, {p99:.0f} ms | {clashes} | {cpu:.2f} ms |"
    assert row in text


def test_the_range_of_routing_is_that_of_the_committed_run() -> None:
    text = " ".join((ROOT / "docs/reference/fleet.md").read_text().split())
    rounds = result("fleet")["routing"]["rounds"]
    found = [each["routed"]["per_second"] / each["scattered"]["per_second"] for each in rounds]
    assert f"range from {min(found):.2f} to {max(found):.2f} times" in text
    assert f"medians of {len(found)} rounds" in text


@pytest.mark.parametrize("page", ["fleet", "entities"])
def test_whether_routing_pays_is_that_of_the_committed_run(page: str) -> None:
    text = " ".join((ROOT / f"docs/reference/{page}.md").read_text().split())
    ratios = result("fleet")["ratios"]
    assert f"{ratios['routed_vs_direct']:.2f} times as many as" in text
    if page == "entities":
        assert f"{ratios['routed_vs_scattered']:.2f} times as many as four that execute" in text


def test_a_split_table_is_that_of_the_committed_run() -> None:
    text = (ROOT / "docs/howto/split-a-table.md").read_text()
    ratios = result("fleet")["ratios"]
    names = ("", "_inserts", "_look_ups", "_inserts_by_hundreds")
    row = " | ".join(f"{ratios[f'sharded_vs_plain{name}']:.2f}" for name in names)
    assert f"\n| {row} |\n" in text
    assert result("fleet")["sharded"]["rows"] == 10_000_000
