"""The README: what it says is true, and a repository's host shows all of it."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests import forking
from tests.docs.test_adoption import FILES, SETTINGS, TEST

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text()
TEXT = " ".join(README.split())


def result(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((ROOT / f"benchmarks/results/{name}.json").read_text())
    return found


def milliseconds(contender: str) -> float:
    return 1000 * median(each[contender]["p50"] for each in result("latency")["rounds"])


@pytest.mark.parametrize(
    ("sentence", "figures"),
    [
        (
            r"Staging a job takes (\S+) times as long as a `.delay\(\)` to Redis",
            lambda: [f"{1 / result('stage')['ratios']['stage_vs_delay']:.1f}"],
        ),
        (
            r"moves (\S+) times as many jobs a second as a loop of `.delay\(\)` sends",
            lambda: [f"{result('drain')['ratios']['drain_vs_delay']:.1f}"],
        ),
        (r"has a job (\S+) ms after its commit", lambda: [f"{milliseconds('wake'):.1f}"]),
        (
            r"publishes, in (\S+) ms where `.delay\(\)` takes (\S+) ms",
            lambda: [f"{milliseconds('immediate'):.2f}", f"{milliseconds('delay'):.2f}"],
        ),
        (
            r"on (\d+) cores that also ran PostgreSQL (\d+) and Redis (\d+), with Celery ([\d.]+):",
            lambda: [
                str(result("drain")["machine"]["cores"]),
                *(
                    result("drain")["versions"][name].split(".")[0]
                    for name in ("PostgreSQL", "Redis")
                ),
                result("drain")["versions"]["celery"].rpartition(".")[0],
            ],
        ),
    ],
)
def test_figures_are_those_of_the_committed_run(
    sentence: str, figures: Callable[[], list[str]]
) -> None:
    found = re.search(sentence, TEXT)
    assert found, sentence
    assert list(found.groups()) == figures()


def test_the_runs_behind_the_figures_had_the_same_condition() -> None:
    runs = [result(name) for name in ("drain", "stage", "latency")]
    for names in (("celery", "PostgreSQL", "Redis"),):
        assert len({tuple(run["versions"][name] for name in names) for run in runs}) == 1
    assert len({run["machine"]["cores"] for run in runs}) == 1
    assert not any(run["quick"] for run in runs)


def detect(folder: Path, test: str) -> str:
    """Run the README's command in a Celery project that does not know this package."""
    files = {**FILES, "settings.py": SETTINGS.replace('"outbox_app", "outbox_app.shadow"', "")}
    for name, text in files.items():
        path = folder / "shop" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    (folder / "test_shop.py").write_text(test)
    [command] = re.findall(r"^\$ (pytest .*)$", README, re.MULTILINE)
    done = forking.run(
        [sys.executable, "-m", *command.split()],
        cwd=folder,
        env={
            **os.environ,
            "PYTHONPATH": f"{folder}:{ROOT}",
            "DJANGO_SETTINGS_MODULE": "shop.settings",
        },
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return str(done.stdout)


def test_the_detector_needs_no_configuration(tmp_path: Path) -> None:
    _, *lines = re.findall(r"```text\n(=.*?)```", README, re.DOTALL)[0].splitlines()
    printed = detect(tmp_path, TEST)
    assert "= tasks sent inside a transaction =" in printed
    assert "\n".join(lines) in printed


def test_the_detector_says_that_it_found_nothing(tmp_path: Path) -> None:
    test = "from shop.tasks import send_receipt\ndef test_send():\n    send_receipt.delay(1)\n"
    printed = detect(tmp_path, test)
    assert "None found. Calls of tasks that were looked at: 1" in printed


def test_the_table_is_that_of_the_demo() -> None:
    """The demo rolls back a third of its 2,000 orders, and each order has three tasks."""
    [table] = re.findall(r"```text\n( +orders .*?)```", README, re.DOTALL)
    rows = dict(re.findall(r"^(\w+(?: \w+)?) +([\d,]+)", table, re.MULTILINE))
    committed, rolled_back = (
        int(rows[name].replace(",", "")) for name in ("committed", "rolled back")
    )
    assert committed + rolled_back == 2000
    assert re.search(rf"^committed +{committed:,} +{3 * committed:,}$", table, re.MULTILINE)
    assert re.search(rf"^executed +{committed:,} +{3 * committed:,}$", table, re.MULTILINE)
    assert re.search(r"^lost +0 +0\nleaked +0 +0$", table, re.MULTILINE)


def test_each_link_and_picture_leads_to_a_file_of_the_repository() -> None:
    links = re.findall(r"\[([^]]*)\]\(([^)\s]+)\)", README)
    assert len(links) > 20
    for words, target in links:
        assert words
        assert (ROOT / target.partition("#")[0]).is_file(), target


def test_nothing_needs_a_host() -> None:
    assert "://" not in README  # no badge, and no address that does not exist yet


def test_it_is_read_in_a_few_minutes() -> None:
    assert len(README.split()) <= 800
