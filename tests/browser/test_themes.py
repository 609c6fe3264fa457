"""Light and dark: by the system's preference and by the admin's own switch, all of it readable."""

from __future__ import annotations

from typing import Any

import pytest
from playwright.sync_api import Page

from .colours import contrast, too_faint
from .survey import Seen, lines
from .test_pages import OVERVIEW

BACKGROUND = "getComputedStyle(document.body).backgroundColor"


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
