"""Each list fits a screen of 1,280 px, with menu and filter open, whatever its rows hold.

The text of an error keeps its lines, and none of them leaves the screen.
"""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Page, expect

from . import data, hostile
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


def test_a_traceback_is_seen_whole(page: Page) -> None:
    page.set_viewport_size({"width": 900, "height": 900})
    opened(page, "/admin/outbox_events/subscription/warehouse-export/change/")
    trace = page.locator("pre.outbox-words")
    expect(trace).to_contain_text("Traceback")
    assert trace.evaluate("each => each.scrollWidth <= each.clientWidth")
    assert page.evaluate("document.documentElement.scrollWidth") == 900


def test_notes_of_an_error_are_lines_of_their_own(project: Project, page: Page) -> None:
    opened(page, "/admin/outbox_events/subscription/warehouse-export/change/")
    cell = page.locator("td.outbox-words", has_text="ConnectionError")
    assert "timed out after 10 s\nHandling outbox_event" in cell.inner_text()
    shown = page.locator(".field-error").inner_text()
    assert "timed out after 10 s; Handling outbox_event" in shown
    project.ask(data.die, "browser.notes", reason="No.\nTried twice.")
    opened(page, "/admin/outbox_app/deadjob/?task=browser.notes")
    assert page.locator(".field-short_reason").inner_text() == "No.\nTried twice."
