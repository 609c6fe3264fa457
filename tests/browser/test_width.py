"""Each list fits a screen of 1,280 px, with menu and filter open, whatever its rows hold."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page

from . import hostile
from .project import Project
from .test_pages import opened


@pytest.fixture
def lists(project: Project) -> Iterator[dict[str, str]]:
    """The lists, by model; each has a row with long values."""
    rows = project.ask(hostile.plant)
    yield {
        model: urlsplit(url).path.rpartition("/change/")[0].rpartition("/")[0] + "/"
        for model, url in rows.items()
    }
    project.ask(hostile.clean)


def test_columns_do_not_leave_the_screen(lists: dict[str, str], page: Page) -> None:
    wide = {}
    for model, address in lists.items():
        opened(page, address)
        assert page.evaluate("innerWidth") == 1280
        assert page.locator("#nav-sidebar").is_visible()
        room = page.locator("#changelist .results").evaluate("each => each.clientWidth")
        width = page.locator("#result_list").evaluate("each => each.scrollWidth")
        page_width = page.evaluate("document.documentElement.scrollWidth")
        if width > room or page_width > 1280:
            wide[model] = (width, room, page_width)
    assert len(lists) > 10
    assert wide == {}
