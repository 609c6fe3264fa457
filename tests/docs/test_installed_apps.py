"""A page that uses a capability shows its line of INSTALLED_APPS first, with the apps it needs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from django.core.management import get_commands

from outbox_app.capability import capabilities

DOCS = Path(__file__).resolve().parents[2] / "docs"
TUTORIAL = ["first-outbox", "events", "entities", "pipeline"]
APPS = {app.name: app for app in capabilities() if app.name != "outbox_app"}
COMMANDS = {name: app for name, app in get_commands().items() if app in APPS}
LINE = re.compile(r"INSTALLED_APPS \+?= \[(.*?)\]", re.DOTALL)
BLOCK = re.compile(
    r"^ *```(?:python|console|python-console)\n(.*?)^ *```$", re.MULTILINE | re.DOTALL
)
USE = re.compile(r"\b(outbox_app\.\w+)|manage\.py (\w+)")


def added(text: str) -> list[str]:
    """The apps of the package that the lines in a text add, in their order."""
    return [app for line in LINE.findall(text) for app in re.findall(r'"(outbox_app\.\w+)"', line)]


def uses(text: str) -> Iterator[tuple[int, str]]:
    """Where a page's code names an app, or a command of one, outside of INSTALLED_APPS."""
    for block in BLOCK.finditer(LINE.sub(lambda found: " " * len(found[0]), text)):
        for use in USE.finditer(block[1]):
            app = use[1] or COMMANDS.get(use[2], "")
            if app in APPS:
                yield block.start(1) + use.start(), app


def late(text: str, before: str = "") -> list[str]:
    """The uses of a page that no line of INSTALLED_APPS precedes."""
    return [
        f"line {text.count(chr(10), 0, at) + 1}: {app}"
        for at, app in uses(text)
        if app not in added(before + text[:at])
    ]


@pytest.mark.parametrize("page", sorted(DOCS.glob("howto/*.md")), ids=lambda page: page.stem)
def test_a_guide_names_its_apps_first(page: Path) -> None:
    assert late(page.read_text()) == []


def test_the_tutorial_adds_each_app_before_it_is_used() -> None:
    before = ""
    for chapter in TUTORIAL:
        text = (DOCS / f"tutorial/{chapter}.md").read_text()
        assert late(text, before) == [], chapter
        before += text


@pytest.mark.parametrize("page", sorted(DOCS.glob("howto/*.md")), ids=lambda page: page.stem)
def test_a_line_has_what_its_apps_need(page: Path) -> None:
    names = added(page.read_text())
    assert [name for name in names if name not in APPS] == []
    missing = {name: set(APPS[name].needs) - set(names) for name in names}
    assert not any(missing.values()), missing


@pytest.mark.parametrize("app", ["outbox_app", *APPS])
def test_each_app_has_a_front_page_that_begins_with_its_line(app: str) -> None:
    names = [*APPS[app].needs, app] if app in APPS else [app]
    listed = ", ".join(f'"{name}"' for name in names)
    line = f"Needs: `INSTALLED_APPS += [{listed}]`"
    fronts = [
        page.stem for page in DOCS.glob("howto/*.md") if page.read_text().split("\n\n")[1] == line
    ]
    assert len(fronts) == 1, (line, fronts)


@pytest.mark.parametrize("page", ["README.md", "docs/tutorial/first-outbox.md"])
def test_the_way_in_names_no_capability(page: str) -> None:
    text = (DOCS.parent / page).read_text()
    assert added(text) == []
    words = (
        r"\bevents?\b|\bentit|\bprepared\b|\bpipeline|\bsnowflake|\bthe fleet\b|\bthe door\b|Spark"
    )
    assert re.findall(words, text) == []
