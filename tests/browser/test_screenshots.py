"""A picture of each page, light and dark, for the documentation; ``make screenshots`` keeps them.

Every run takes the pictures, into a temporary folder, so that ``make screenshots`` always works.
"""

from __future__ import annotations

import io
import os
import re
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from django.urls import resolve
from PIL import Image
from playwright.sync_api import Page, expect

from tests.tables import list_of, short_name

from . import data
from .poison import POISON
from .project import ROOT, Project
from .test_pages import GO, OVERVIEW, opened

IMAGES = ROOT / "docs" / "images" / "admin"
TOUR = ROOT / "docs" / "howto" / "admin.md"
#: What is below is cut off, in CSS pixels: nobody scrolls through a list in a picture.
HEIGHT = 1000
#: Below the content.
MARGIN = 16


def _question(page: Page, model: str, action: str) -> None:
    opened(page, list_of(model))
    page.locator("#result_list tbody input[type=checkbox]").first.check()
    page.get_by_label("Action:").select_option(action)
    page.get_by_role("button", name=GO).click()
    expect(page.locator("#content input[type=submit]")).to_be_visible()


def _row(page: Page, model: str, text: str) -> None:
    opened(page, list_of(model))
    row = page.locator("#result_list").get_by_role("row", name=text).first
    row.locator("th a").first.click()
    expect(page).to_have_url(re.compile("/change/"))


def _progress(page: Page) -> None:
    opened(page, list_of("deadjob") + "?task=shop.tasks.export")
    page.locator("#result_list thead").get_by_role("checkbox").check()
    page.get_by_role("button", name="Select all").click()
    page.get_by_label("Action:").select_option("discard_selected")
    page.get_by_role("button", name=GO).click()
    page.get_by_label("Reason").fill("The export of last night was repeated by hand.")
    page.locator("#content input[type=submit]").click()
    expect(page.get_by_role("button", name="Continue")).to_be_visible()


PICTURES: dict[str, Any] = {
    "index": lambda page: opened(page, "/admin/outbox_app/"),
    "overview": lambda page: opened(page, OVERVIEW),
    "overview-tables": lambda page: opened(page, OVERVIEW),
    "staged-jobs": lambda page: opened(
        page, list_of("stagedjob") + "?state=held&task=shop.tasks.remind_customer"
    ),
    "staged-job": lambda page: _row(page, "stagedjob", "customer-3"),
    "dead-jobs": lambda page: opened(
        page, list_of("deadjob") + "?error=outbox_app.exceptions.Unroutable"
    ),
    "dead-job": lambda page: _row(page, "deadjob", "Unroutable"),
    "requeue": lambda page: _question(page, "deadjob", "requeue_selected"),
    "events": lambda page: opened(page, list_of("event") + "?type=invoice.sent"),
    "event": lambda page: _row(page, "event", "invoice.sent order-1042"),
    "subscriptions": lambda page: opened(page, list_of("subscription")),
    "subscription": lambda page: _row(page, "subscription", "warehouse-export"),
    "replay": lambda page: _question(page, "subscription", "replay_selected"),
    "parked-streams": lambda page: opened(page, list_of("parkedstream")),
    "parked-stream": lambda page: _row(page, "parkedstream", POISON),
    "gaps": lambda page: opened(page, list_of("gap")),
    "gap": lambda page: _row(page, "gap", "order-2001"),
    "prepared-events": lambda page: opened(page, list_of("preparedevent")),
    "prepared-event": lambda page: _row(page, "preparedevent", "invoice.paid"),
    "servers": lambda page: opened(page, list_of("server")),
    "server": lambda page: _row(page, "server", "shop-1"),
    "task-results": lambda page: opened(page, list_of("taskresult")),
    "task-result": lambda page: _row(page, "taskresult", "shop.tasks.pack"),
    "drainer": lambda page: _row(page, "process", "jobs"),
    "drainers": lambda page: opened(page, list_of("process")),
    "incident": lambda page: _row(page, "incident", "taken over"),
    "incidents": lambda page: opened(page, list_of("incident")),
    "statistic": lambda page: opened(page, list_of("statistic") + "1/change/"),
    "statistics": lambda page: opened(page, list_of("statistic") + "?name=published"),
    # The last one: its rows would be in the others.
    "progress": _progress,
}
THEMES: tuple[Any, ...] = ("light", "dark")
NAMES = {f"{name}-{theme}.png" for name in PICTURES for theme in THEMES}
#: Without what is above the first of these.
BELOW = {"overview-tables": ".outbox-table"}
#: Without what begins at this element.
ABOVE = {"overview": ".outbox-chart >> nth=2"}
#: As high as they are.
WHOLE = {"overview-tables"}
#: Where the files of this project are, and those of Python and its packages.
FOLDERS = {str(ROOT), sys.prefix, sys.base_prefix} - {"/usr"}


def test_pictures_of_every_page(project: Project, page: Page, pictures: Path) -> None:
    pictures.mkdir(parents=True, exist_ok=True)
    visited = set()
    for name, show in PICTURES.items():
        page.emulate_media(color_scheme="light")
        if show is _progress:
            project.ask(data.die_often, "shop.tasks.export", 1400)
        show(page)
        page.wait_for_load_state()
        match = resolve(urlsplit(page.url).path)
        visited.add(short_name(str(match.url_name)))
        # The pictures are of the pages, not of the list beside them.
        page.evaluate("document.getElementById('nav-sidebar')?.remove()")
        page.evaluate("document.getElementById('toggle-nav-sidebar')?.remove()")
        bottom = "document.getElementById('content').getBoundingClientRect().bottom + scrollY"
        height = page.evaluate(bottom) + MARGIN
        assert [folder for folder in FOLDERS if folder in page.content()] == [], name
        top = _top(page, BELOW[name]) if name in BELOW else 0
        if name in ABOVE:
            height = _top(page, ABOVE[name]) - MARGIN / 2
        shown = height - top if name in WHOLE else min(height, HEIGHT)
        clip = {"x": 0, "y": top, "width": 1280, "height": shown}
        for theme in THEMES:
            page.emulate_media(color_scheme=theme)
            taken = page.screenshot(full_page=True, clip=clip, animations="disabled")
            _save(taken, pictures / f"{name}-{theme}.png")
    project.ask(data.delete, "outbox_app.DeadJob", task="shop.tasks.export")
    # History is Django's own page, with nothing of ours.
    every = {name for name in project.ask(data.addresses) if not name.endswith("_history")}
    assert visited >= every - {"index", "outbox", "overview_changelist"}
    taken_now = {path.name for path in pictures.glob("*.png")}
    assert taken_now == NAMES


def _top(page: Page, selector: str) -> float:
    box = page.locator(selector).first.bounding_box()
    assert box is not None
    return box["y"]


def _save(taken: bytes, path: Path) -> None:
    """Write a picture; one that is kept with few colours, which takes a third of the room."""
    if "SCREENSHOTS" not in os.environ:
        path.write_bytes(taken)
        return
    image = Image.open(io.BytesIO(taken)).convert("RGB")
    few = image.quantize(96, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    few.save(path, optimize=True)


def test_every_picture_is_kept_and_none_besides() -> None:
    kept = {path.name for path in IMAGES.glob("*")}
    assert kept == NAMES
    assert sum(path.stat().st_size for path in IMAGES.glob("*")) < 2_000_000


def test_the_tour_shows_pictures_that_are_there() -> None:
    shown = re.findall(r"images/admin/([\w.-]+)", TOUR.read_text())
    missing = [name for name in shown if not (IMAGES / name).exists()]
    assert shown
    assert not missing
    assert {name.rpartition("-")[0] for name in shown} == set(PICTURES)
