"""Each page of the outbox in the admin opens under a strict policy, and has its title.

``page`` fails a test for any error on the console, any violation of the policy, any request that
fails, and any request to another host.
"""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import Page, expect

from . import data
from .policy import POLICY
from .project import Project
from .survey import Seen

OVERVIEW = "/admin/outbox_app/overview/"
#: The button beside the actions of a list; Django 6.1 renamed it.
GO = re.compile("^(Go|Run)$")


def opened(page: Page, address: str) -> Page:
    response = page.goto(address)
    assert response is not None
    assert response.status == 200, address
    assert response.headers["content-security-policy"] == POLICY
    return page


def test_one_logs_in_and_finds_the_overview(project: Project, open_page: Any) -> None:
    page = open_page()
    page.context.clear_cookies()
    page.goto("/admin/")
    page.get_by_label("Username").fill("demo")
    page.get_by_label("Password").fill("demo")
    page.get_by_role("button", name="Log in").click()
    page.locator("#content").get_by_role("link", name="Outbox", exact=True).click()
    page.locator("#content").get_by_role("link", name="Overview").click()
    expect(page).to_have_title("Overview | Django site admin")
    assert urlsplit(page.url).path == OVERVIEW


def test_every_page_opens(seen: dict[str, Seen]) -> None:
    """Without an error on the console, a violation of the policy or a request to another host."""
    assert {name: page.status for name, page in seen.items() if page.status != 200} == {}
    assert {page.policy for page in seen.values()} == {POLICY}
    assert {"overview", "deadjob_change", "subscription_changelist"} < set(seen)
    for name, page in seen.items():
        assert " | " in page.title, name
        assert page.text.strip(), name


def test_the_policy_suits_the_rest_of_the_admin(page: Page) -> None:
    """Nothing of it takes an exception, so nobody has to weaken the policy for our pages."""
    for address in ("", "auth/user/", "auth/user/1/change/", "shop/order/", "password_change/"):
        opened(page, f"/admin/{address}")


def test_every_page_opens_without_javascript(project: Project, open_page: Any) -> None:
    page = open_page(java_script_enabled=False)
    for address in project.ask(data.addresses).values():
        opened(page, address)
        assert page.locator("#content").inner_text().strip()


def test_no_link_leads_nowhere(project: Project, seen: dict[str, Seen], page: Page) -> None:
    """Links of all pages, those with filters too; of many that differ in a value only, one."""
    kinds = {}
    for name, each in seen.items():
        for link in each.links:
            parts = urlsplit(link)
            assert parts.netloc == project.address, (name, link)
            steps = [step for step in parts.path.split("/") if not any(map(str.isdigit, step))]
            names = sorted(pair.partition("=")[0] for pair in parts.query.split("&"))
            kinds[(*steps, *names)] = link
    assert len(kinds) > 20
    for link in kinds.values():
        assert page.request.get(link).status == 200, link


def test_filters_and_search_find_what_they_should(project: Project, page: Page) -> None:
    opened(page, "/admin/outbox_app/deadjob/")
    page.get_by_role("link", name="builtins.KeyError").click()
    expect(page.get_by_text("2 dead jobs")).to_be_visible()
    opened(page, "/admin/outbox_app/stagedjob/")
    page.locator("#searchbar").fill("b71e02aa-0000-4000-8000-000000000903")
    page.get_by_role("button", name="Search").click()
    expect(page.locator(".paginator")).to_contain_text(re.compile(r"\b1 staged job\b"))
    page.get_by_role("row", name="customer-3").get_by_role("link").first.click()
    expect(page.get_by_text("traceparent")).to_be_visible()


def test_a_stream_leads_to_its_events(project: Project, page: Page) -> None:
    opened(page, "/admin/outbox_events/event/?stream=order-1042")
    expect(page.locator("#result_list tbody tr")).to_have_count(2)
    page.get_by_role("row", name="invoice.sent").get_by_role("link").first.click()
    expect(page.get_by_text("customer-1042@shop.example")).to_be_visible()
    page.locator("#content-main").get_by_role("link", name="order-1042").click()
    expect(page.locator("#result_list tbody tr")).to_have_count(2)
