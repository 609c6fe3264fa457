"""The overview answers an on-call engineer's questions, and updates itself without a reload."""

from __future__ import annotations

import re
from typing import Any

from playwright.sync_api import Page, expect

from . import data
from .project import Project
from .test_pages import OVERVIEW, opened

#: Longer than the page waits between two looks, in milliseconds.
A_WHILE = 11_000


def refresh(page: Page) -> None:
    """Let the page refresh itself, and wait until it has; its clock is installed."""
    page.locator(".outbox-headline").evaluate("verdict => { verdict.id = 'before'; }")
    page.clock.fast_forward(A_WHILE)
    expect(page.locator("#before")).to_have_count(0)


def test_it_answers_what_one_asks_in_the_night(project: Project, page: Page) -> None:
    opened(page, OVERVIEW)
    content = page.locator("#content")
    verdict = content.locator(".outbox-headline")
    words = r"^1 subscription is failing: ConnectionError: .* after 10 s\. \d+ other problems\.$"
    expect(verdict).to_have_text(re.compile(words))
    expect(content.get_by_role("row", name=re.compile("shop-1.*128"))).to_be_visible()
    problems = content.get_by_role("list", name="What needs attention")
    expect(problems.get_by_role("link", name="warehouse-export", exact=True)).to_be_visible()
    expect(content.get_by_role("row", name=re.compile("newsletter paused"))).to_be_visible()
    dead = content.get_by_role("table", name="Dead jobs")
    cells = dead.get_by_role("row", name=re.compile("^shop.tasks.send_receipt")).get_by_role("cell")
    assert cells.all_inner_texts()[:6] == ["9", "12", "12", "12", "12", "12"]
    expect(content.get_by_role("table", name="Open gaps").get_by_text("order-2001")).to_be_visible()


def test_a_cell_of_the_matrix_leads_to_its_jobs(page: Page) -> None:
    opened(page, OVERVIEW)
    dead = page.get_by_role("table", name="Dead jobs")
    row = dead.get_by_role("row", name=re.compile("^shop.tasks.capture_payment"))
    row.get_by_role("cell").nth(2).get_by_role("link", name="5").click()
    expect(page.locator("#result_list tbody tr")).to_have_count(5)


def test_it_refreshes_itself(project: Project, page: Page) -> None:
    page.clock.install()
    opened(page, OVERVIEW)
    page.evaluate("window.same = true")
    rows = page.get_by_role("table", name="Dead jobs").get_by_role(
        "row", name=re.compile("refresh")
    )
    expect(rows).to_have_count(0)
    project.ask(data.die, "browser.refresh")
    refresh(page)
    expect(rows).to_have_count(1)
    assert page.evaluate("window.same")


def test_it_leaves_alone_what_one_is_doing(page: Page) -> None:
    page.clock.install()
    opened(page, OVERVIEW)
    page.get_by_text("As a table").first.click()
    link = page.locator("#outbox-live").get_by_role("link", name="Subscriptions", exact=True)
    link.focus()
    refresh(page)
    expect(page.locator("#outbox-live details").first).to_have_attribute("open", "")
    expect(link).to_be_focused()


def test_what_has_not_changed_is_not_read_out_again(page: Page) -> None:
    page.clock.install()
    opened(page, OVERVIEW)
    assert page.locator("[aria-live], [role=status], [role=alert]").count() == 1
    refresh(page)
    both = (
        "['[role=status]', '.outbox-headline'].map(each => document.querySelector(each).innerText)"
    )
    said, verdict = page.evaluate(both)
    assert said in ("", verdict)  # figures never


def test_one_can_turn_it_off(page: Page) -> None:
    page.clock.install()
    opened(page, OVERVIEW)
    page.get_by_label("Refresh every 10 s").uncheck()
    asked = []
    page.on("request", lambda request: asked.append(request.url))
    page.clock.run_for(5 * A_WHILE)
    assert not asked


def test_it_says_when_it_cannot_refresh(page: Page) -> None:
    page.clock.install()
    opened(page, OVERVIEW)
    page.watch.end()  # type: ignore[attr-defined]
    page.context.clear_cookies()  # the session has ended
    page.clock.fast_forward(A_WHILE)
    expect(page.get_by_text("Not refreshed")).to_be_visible()


def test_it_shows_only_what_one_may_see(project: Project, open_page: Any) -> None:
    page = open_page(("view_process", "view_deadjob"))
    opened(page, OVERVIEW)
    expect(page.get_by_role("table", name="Dead jobs")).to_be_visible()
    for name in ("Subscriptions", "Open gaps", "Latest incidents"):
        expect(page.get_by_role("table", name=name)).to_have_count(0)


def test_with_jobs_only_it_fits_two_screens(project: Project, open_page: Any) -> None:
    page = open_page(("view_process", "view_stagedjob", "view_deadjob", "view_incident"))
    opened(page, OVERVIEW)
    expect(page.get_by_role("table", name="Dead jobs")).to_be_visible()
    assert page.locator("figure").count() == 4
    height = page.evaluate("document.documentElement.scrollHeight")
    assert height <= 2 * page.evaluate("innerHeight")
