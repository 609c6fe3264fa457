"""Hostile text in rows does nothing in the browser: it is escaped, visible and cut."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlencode

import pytest
from playwright.sync_api import Page, expect

from tests.tables import list_of

from . import data, hostile
from .project import Project
from .test_overview import refresh
from .test_pages import OVERVIEW, opened

#: Whether anything planted has become more than text.
ALIVE = """
() => [
  window.hacked || "",
  ...[...document.querySelectorAll("img[src=x], script:not([src])")].map(each => each.outerHTML),
  ...[...document.querySelectorAll("[href], [src], [action], [formaction]")]
    .filter(each => ["href", "src", "action", "formaction"].some(
      name => /^\\s*(javascript|data|vbscript):/i.test(each.getAttribute(name) || "")))
    .map(each => each.outerHTML),
  ...[...document.querySelectorAll("*")]
    .filter(each => [...each.attributes].some(one => one.name.startsWith("on")))
    .map(each => each.outerHTML),
].filter(Boolean).map(each => each.slice(0, 300))
"""
#: No page needs more, however long the texts in its rows.
LARGEST = 400_000


@pytest.fixture
def planted(project: Project) -> Iterator[dict[str, str]]:
    yield project.ask(hostile.plant)
    project.ask(hostile.clean)


def harmless(page: Page) -> str:
    """Look at the page that is open; return its text."""
    assert page.evaluate(ALIVE) == []
    assert len(page.content()) < LARGEST
    text = page.locator("#content").inner_text()
    assert not set("\x1b\x07\u202e") & set(text)
    return text


def test_nothing_planted_comes_to_life(
    project: Project, planted: dict[str, str], page: Page
) -> None:
    pages = {name: url for name, url in project.ask(data.addresses).items() if "_c" not in name}
    lists = {f"{model}s": url.rpartition("/change/")[0].rpartition("/")[0] + "/"
             for model, url in planted.items()}  # fmt: skip
    for name, address in {**pages, **lists, **planted}.items():
        opened(page, address)
        text = harmless(page)
        if name in planted or name in lists:
            assert "<script>" in text or "javascript:" in text, name


def test_nor_on_the_overview_when_it_refreshes(planted: dict[str, str], page: Page) -> None:
    page.clock.install()
    opened(page, OVERVIEW)
    assert "<script>" in harmless(page)
    refresh(page)
    harmless(page)


def test_nor_in_what_one_asks_for(planted: dict[str, str], page: Page) -> None:
    for model, column in (("deadjob", "task"), ("stagedjob", "task"), ("event", "stream"),
                          ("gap", "subscription"), ("statistic", "name")):  # fmt: skip
        query = urlencode({column: f"{hostile.MARKUP} {hostile.LINK}", "q": hostile.MARKUP})
        page.goto(f"{list_of(model)}?{query}")
        harmless(page)


def test_nor_in_a_question_and_its_outcome(planted: dict[str, str], page: Page) -> None:
    opened(page, planted["deadjob"])
    page.locator("#content button[value=discard_selected]").click()
    expect(page.get_by_label("Reason")).to_be_visible()
    assert "<script>" in harmless(page)
    page.get_by_label("Reason").fill(hostile.MARKUP)
    page.locator("#content input[type=submit]").click()
    expect(page.locator(".messagelist")).to_contain_text("1 dead job was discarded.")
    harmless(page)
    opened(page, "/admin/")
    harmless(page)
