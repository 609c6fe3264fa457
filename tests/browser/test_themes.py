"""Light and dark, by the system's preference and by the admin's switch: all text is readable."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page

from tests.tables import list_of

from .colours import contrast, too_faint
from .survey import Seen, lines
from .test_actions import choose
from .test_pages import OVERVIEW

BACKGROUND = "getComputedStyle(document.body).backgroundColor"
#: Themes such as unfold: none of the admin's rules and variables, a reset in a layer of its own.
REPLACED = """() => {
  const own = sheet => sheet.href?.includes("outbox_app");
  for (const sheet of document.styleSheets) sheet.disabled = !own(sheet);
  const reset = new CSSStyleSheet();
  reset.replaceSync(`@layer base { * { border: 0 solid } } body { color: #eee; background: #111 }`);
  document.adoptedStyleSheets = [reset];
}"""


def test_contrast_is_computed_as_defined() -> None:
    assert contrast((0, 0, 0), (255, 255, 255)) == 21
    assert contrast((255, 0, 0), (255, 0, 0)) == 1
    assert round(contrast((118, 118, 118), (255, 255, 255)), 2) == 4.54


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_everything_can_be_read(seen: dict[str, Seen], theme: str) -> None:
    faint = {name: sorted(set(page.faint[theme])) for name, page in seen.items()}
    assert {name: found for name, found in faint.items() if found} == {}


def test_lines_of_charts_have_colours_of_their_theme(seen: dict[str, Seen]) -> None:
    overview = seen["overview"]
    assert len(set(overview.lines["light"].values())) == len(overview.lines["light"]) == 3
    assert not set(overview.lines["light"].values()) & set(overview.lines["dark"].values())


def test_a_theme_that_replaces_the_admin_shows_lines_and_fields(open_page: Any) -> None:
    page = open_page(color_scheme="dark")
    page.goto(OVERVIEW)
    page.evaluate(REPLACED)
    axis = "getComputedStyle(document.querySelector('.outbox-chart text')).fill"
    assert page.evaluate(axis) == "rgb(238, 238, 238)"
    choose(page, list_of("deadjob"), "requeue_selected")
    reason = page.get_by_label("Reason")
    reason.wait_for()
    page.wait_for_load_state()  # with its style sheets
    page.evaluate(REPLACED)
    for field in (reason, page.locator(".outbox-ask input[type=submit]")):
        assert field.evaluate("each => getComputedStyle(each).borderTopWidth") == "1px"


def test_the_switch_of_the_admin_does_the_same(page: Page, open_page: Any) -> None:
    dark = open_page(color_scheme="dark")
    dark.goto(OVERVIEW)
    page.goto(OVERVIEW)
    assert page.evaluate(BACKGROUND) != dark.evaluate(BACKGROUND)
    for _ in range(3):
        if page.locator("html").get_attribute("data-theme") == "dark":
            break
        page.locator("button.theme-toggle").first.click()
    assert page.evaluate(BACKGROUND) == dark.evaluate(BACKGROUND)
    assert not too_faint(page, "#content")
    assert lines(page) == lines(dark)
